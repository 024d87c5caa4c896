"""Plays the kubelet of one node, for tests: pods' containers are processes of this machine.

    python tests/labs/kubelet.py NAME --root DIR [--zone ZONE] [--pods-environment JSON]

It registers the node, renews its lease and its Ready condition, runs the pods that the scheduler
has bound to the node, and ends deleted pods: the hook preStop, SIGTERM, and SIGKILL after the grace
period. KUBECONFIG names the API. Images have no meaning here, all pods share the file system and
the address of this machine, and paths below DIR stand for volumes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from lightkube import ApiError, Client
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import (
    Event,
    Node,
    Pod,
    Secret,
    ServiceAccount,
)
from lightkube.types import PatchType

from holdfast.clusters.kubernetes.kubernetes_manifests import ZONE
from holdfast.engine.host.lifetime import die_with_parent

LOOK_S = 0.05
RENEW_S = 0.5
LEASES = "kube-node-lease"
ADDRESS = "127.0.0.1"
UNMOUNTABLE = "unmountable"  # a folder below DIR; a node whose name is there mounts no volume
UNMOUNTED = 'MountVolume.SetUp failed for volume "data" : mount failed: exit status 32'
POD_MARK, NODE_MARK = "HOLDFAST_TEST_POD", "HOLDFAST_TEST_NODE"


def name_in(root: Path, name: str) -> str:
    """Return the mark of a pod or node; other clusters on this machine have the same names."""
    return f"{root}:{name}"


def marked(mark: str, value: str) -> list[int]:
    """Return the live processes with this mark in their environment."""
    wanted, found = f"{mark}={value}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def kill_marked(mark: str, value: str) -> None:
    """Kill all processes of a pod or node, and the processes that they still start."""
    while found := marked(mark, value):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def expand(word: str, environment: dict[str, str]) -> str:
    """Replace the variables in a command by their values."""
    return re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word)


@dataclass
class RunningPod:
    """Describes a pod to the kubelet: the process of its only container."""

    name: str
    namespace: str
    container: dict[str, Any]
    environment: dict[str, str]
    popen: subprocess.Popen[bytes]
    hook: subprocess.Popen[bytes] | None = None
    stages: set[str] = field(default_factory=set)
    told: bool = False


class Kubelet:
    """Runs the pods of one node; a pod whose process it does not know has failed."""

    def __init__(
        self, client: Client, name: str, zone: str, root: Path, more: dict[str, str]
    ) -> None:
        self._client = client
        self._name = name
        self._zone = zone
        self._root = root
        self._more = more  # variables of all pods here
        self._pods: dict[str, RunningPod] = {}  # by uid
        self._renewed_at = float("-inf")
        self._failed_at = float("-inf")

    def run(self) -> None:
        while True:
            try:
                self._look()
            except ApiError as error:
                sys.stderr.write(f"kubelet {self._name}: {error}\n")
            except HTTPError:
                pass  # the API is away: pods continue
            time.sleep(LOOK_S)

    def _look(self) -> None:
        if time.monotonic() >= self._renewed_at + RENEW_S:
            self._renew()
            self._renewed_at = time.monotonic()
        listed = self._client.list(Pod, namespace="*", fields={"spec.nodeName": self._name})
        pods = {pod["metadata"]["uid"]: pod for pod in (each.to_dict() for each in listed)}
        for uid in [uid for uid in self._pods if uid not in pods]:  # deleted by force
            self._kill(self._pods.pop(uid))
        for uid, pod in pods.items():
            running = self._pods.get(uid)
            if running is not None:
                self._watch(uid, running, pod)
            elif "deletionTimestamp" in pod["metadata"]:
                self._delete(pod["metadata"]["namespace"], pod["metadata"]["name"])
            elif pod["status"].get("phase") == "Pending":
                if (self._root / UNMOUNTABLE / self._name).exists():
                    self._fail_to_mount(pod)
                else:
                    with contextlib.suppress(ApiError):  # for example, a Secret is missing
                        self._start(uid, pod)
            elif pod["status"].get("phase") == "Running":
                self._tell(pod["metadata"]["namespace"], pod["metadata"]["name"], "Failed", 137)

    # ------------------------------------------------------------ the node

    def _renew(self) -> None:
        """Register the node if it is not, and report that it is ready."""
        now = datetime.now(timezone.utc)
        heard = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        ready |= {"lastHeartbeatTime": heard, "lastTransitionTime": heard}
        room = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"conditions": [ready], "capacity": room, "allocatable": room}
        labels = {
            "kubernetes.io/hostname": self._name,
            ZONE: self._zone,
        }
        about: dict[str, Any] = {"name": self._name, "labels": labels}
        spec: dict[str, Any] = {"holderIdentity": self._name, "leaseDurationSeconds": 40}
        spec["renewTime"] = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        create: Any = self._client.create
        patch: Any = self._client.patch
        try:
            patch(Node.Status, self._name, {"status": status}, patch_type=PatchType.STRATEGIC)
        except ApiError as error:
            if error.response.status_code != 404:
                raise
            create(Node.from_dict({"metadata": about, "spec": {}, "status": status}))
        how = {"namespace": LEASES, "patch_type": PatchType.MERGE}
        try:
            patch(Lease, self._name, {"spec": spec}, **how)
        except ApiError as error:
            if error.response.status_code != 404:
                raise
            lease = {"metadata": {"name": self._name, "namespace": LEASES}, "spec": spec}
            create(Lease.from_dict(lease))

    # ------------------------------------------------------------ pods

    def _start(self, uid: str, pod: dict[str, Any]) -> None:
        about, container = pod["metadata"], pod["spec"]["containers"][0]
        name, namespace = about["name"], about["namespace"]
        marks = {POD_MARK: name_in(self._root, name), NODE_MARK: name_in(self._root, self._name)}
        marks |= {"HOSTNAME": name, **self._environment(pod, container)}
        (self._root / "pods").mkdir(exist_ok=True)
        self._make_mount_points(container)
        environment = self._process_environment(pod, marks)
        with open(self._root / "pods" / f"{name}.log", "ab") as log:
            popen = subprocess.Popen(
                [expand(word, environment) for word in container["command"]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._pods[uid] = RunningPod(name, namespace, container, environment, popen)
        self._tell(namespace, name, "Running")

    def _make_mount_points(self, container: dict[str, Any]) -> None:
        for mount in container.get("volumeMounts", ()):
            if Path(mount["mountPath"]).is_relative_to(self._root):
                Path(mount["mountPath"]).mkdir(parents=True, exist_ok=True)

    def _process_environment(self, pod: dict[str, Any], marks: dict[str, str]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        environment = {**os.environ, **self._more, "PATH": path, **marks}
        del environment["KUBECONFIG"]
        if account := pod["spec"].get("serviceAccountName"):
            about = pod["metadata"]
            path_of = self._root / "pods" / f"{about['name']}.kubeconfig"
            config = self._account(about["namespace"], account, path_of)
            environment["KUBECONFIG"] = str(config)
        return environment

    def _fail_to_mount(self, pod: dict[str, Any]) -> None:
        """Record that a pod cannot be started, as a real kubelet does: in an event that it repeats.

        By the source of Kubernetes 1.37: pkg/kubelet/kubelet.go (FailedMountVolume).
        """
        if time.monotonic() < self._failed_at + RENEW_S:
            return
        self._failed_at = time.monotonic()
        about = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        name, namespace = f"{about['name']}.mount", about["namespace"]
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        create: Any = self._client.create
        patch: Any = self._client.patch
        try:
            how = {"namespace": namespace, "patch_type": PatchType.MERGE}
            patch(Event, name, {"lastTimestamp": now}, **how)
        except ApiError as error:
            if error.response.status_code != 404:
                raise
            told = {
                "metadata": {"name": name, "namespace": namespace},
                "involvedObject": {"kind": "Pod", "apiVersion": "v1", **about},
                "type": "Warning",
                "reason": "FailedMount",
                "message": UNMOUNTED,
                "firstTimestamp": now,
                "lastTimestamp": now,
            }
            create(Event.from_dict(told))

    def _environment(self, pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in container.get("env", ()):
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                wanted = source["secretKeyRef"]
                secret = self._get_secret(pod, container, wanted["name"])
                plain = secret.get("stringData", {}).get(wanted["key"])
                data = secret.get("data", {}).get(wanted["key"], "")
                found[each["name"]] = plain or base64.b64decode(data).decode()
            elif "fieldRef" in source:
                about = pod["metadata"]
                fields = {"status.podIP": ADDRESS, "metadata.name": about["name"]}
                for key, value in about.get("labels", {}).items():
                    fields[f"metadata.labels['{key}']"] = value
                found[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            else:
                found[each["name"]] = each.get("value", "")
        return found

    def _get_secret(
        self, pod: dict[str, Any], container: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Return a Secret; a missing one keeps the pod waiting, as with a real kubelet."""
        about = pod["metadata"]
        try:
            found = self._client.get(Secret, name, namespace=about["namespace"])
        except ApiError as error:
            if error.response.status_code == 404:
                why = {
                    "reason": "CreateContainerConfigError",
                    "message": f'secret "{name}" not found',
                }
                parts = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
                waits = [{"name": container["name"], "state": {"waiting": why}, **parts}]
                patch: Any = self._client.patch
                patch(Pod.Status, about["name"], {"status": {"containerStatuses": waits}},
                      namespace=about["namespace"], patch_type=PatchType.STRATEGIC)  # fmt: skip
            raise
        made: dict[str, Any] = found.to_dict()
        return made

    def _account(self, namespace: str, account: str, path: Path) -> Path:
        """Write how a pod reaches the API as its service account."""
        create: Any = self._client.create
        asked = ServiceAccount.Token.from_dict({"metadata": {}, "spec": {"audiences": []}})
        token = str(create(asked, account, namespace=namespace).to_dict()["status"]["token"])
        config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
        config["users"][0]["user"] = {"token": token}
        path.write_text(json.dumps(config))
        return path

    def _watch(self, uid: str, running: RunningPod, pod: dict[str, Any]) -> None:
        deleted = pod["metadata"].get("deletionTimestamp")
        if pod["status"].get("phase") == "Pending" and not running.told:
            # The API did not answer the first report.
            self._tell(running.namespace, running.name, "Running")
        if running.popen.poll() is not None and not running.told:
            self._kill(running)
            code = running.popen.returncode
            # Other containers, which are not started here, would continue.
            goes_on = len(pod["spec"]["containers"]) > 1 and deleted is None
            self._tell(
                running.namespace,
                running.name,
                "Running" if goes_on else "Failed" if code else "Succeeded",
                code if code >= 0 else 128 - code,
                "Error" if code else "Completed",
                running.container["name"],
            )
            running.told = True
        if deleted is None:
            return
        if running.told:
            self._delete(running.namespace, running.name)
            del self._pods[uid]
            return
        self._end(running, datetime.fromisoformat(deleted.replace("Z", "+00:00")))

    def _end(self, running: RunningPod, until: datetime) -> None:
        """Take the next step towards the end of a pod that is deleted."""
        if "hook" not in running.stages:
            running.stages.add("hook")
            hook = running.container.get("lifecycle", {}).get("preStop", {}).get("exec")
            if hook is not None:
                command, environment = hook["command"], running.environment
                running.hook = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        over = datetime.now(timezone.utc) >= until
        waits = running.hook is not None and running.hook.poll() is None
        if "term" not in running.stages and (over or not waits):
            running.stages.add("term")
            running.popen.terminate()
        if over:
            self._kill(running)

    def _kill(self, running: RunningPod) -> None:
        kill_marked(POD_MARK, name_in(self._root, running.name))

    def _tell(
        self,
        namespace: str,
        name: str,
        phase: str,
        code: int | None = None,
        reason: str = "Error",
        container: str = "main",
    ) -> None:
        status: dict[str, Any] = {"phase": phase, "podIP": ADDRESS}
        ready = "True" if phase == "Running" else "False"
        status["conditions"] = [{"type": "Ready", "status": ready}]
        if code is not None:
            state = {"terminated": {"exitCode": code, "reason": reason}}
            parts = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
            status["containerStatuses"] = [{"name": container, "state": state, **parts}]
        patch: Any = self._client.patch
        with contextlib.suppress(ApiError):  # it is gone
            patch(Pod.Status, name, {"status": status}, namespace=namespace,
                  patch_type=PatchType.STRATEGIC)  # fmt: skip

    def _delete(self, namespace: str, name: str) -> None:
        with contextlib.suppress(ApiError):
            self._client.delete(Pod, name, namespace=namespace, grace_period=0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kubelet.py")
    parser.add_argument("name")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--zone", default="zone0")
    parser.add_argument("--pods-environment", type=json.loads, default={})
    options = parser.parse_args(argv)
    die_with_parent(os.getppid())
    more = options.pods_environment
    Kubelet(Client(), options.name, options.zone, options.root, more).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
