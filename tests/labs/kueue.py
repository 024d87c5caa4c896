"""Runs a real Kueue beside the control plane of a test, with one queue.

The folder that HOLDFAST_KUEUE names has its program and manifests, as `build_kueue.sh` leaves them.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import yaml

from certificates import make_certificates
from labs.etcd_cluster import free_ports

HOST = "127.0.0.1"
UP_S = 60.0
FOLDER = "HOLDFAST_KUEUE"
QUEUE, CLUSTER_QUEUE, URGENT = "training", "team", "urgent"
API = "kueue.x-k8s.io/v1beta2"
# The place of the certificate of Kueue's metrics cannot be set.
METRICS = "/etc/kueue/metrics/certs"


def missing() -> str:
    """Return why Kueue cannot run here; empty if it can."""
    folder = os.environ.get(FOLDER, "")
    if not folder or not os.access(Path(folder, "kueue"), os.X_OK):
        return f"{FOLDER} names no folder with Kueue: `make kubernetes-lab` builds it"
    if os.geteuid() != 0:
        return "Kueue's certificates are mounted in /etc, which needs root"
    return "" if shutil.which("kubectl") else "kubectl is not installed"


class Kueue:
    """Runs Kueue with a queue of some cores, while used as a context manager.

    `config`: a kubeconfig file of an administrator. The queue is called `training`, and works of
    the priority `urgent` preempt all others.
    """

    def __init__(self, folder: Path, config: Path, cores: int) -> None:
        self._folder = folder
        self._config = config
        self._cores = cores
        self._built = Path(os.environ[FOLDER])
        self._running: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Kueue:
        self._folder.mkdir()
        certificates = make_certificates(self._folder, HOST)
        webhook, health = free_ports(2)
        (self._folder / "config.json").write_text(json.dumps(self._configure(webhook, health)))
        self._apply(types := self._built / "types")
        established = ("--for=condition=Established", f"--timeout={UP_S:g}s")
        self.kubectl("wait", *established, f"--filename={types}")
        authority = (certificates / "ca.crt").read_text()
        self._apply(self._write_webhooks(f"https://{HOST}:{webhook}", authority))
        self._start()
        self._until_ready(f"http://{HOST}:{health}/readyz")
        self.apply(*self._queues())
        return self

    def __exit__(self, *exc: object) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply objects, while the webhooks may still be coming up."""
        path = self._folder / "objects.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        deadline = time.monotonic() + UP_S
        while True:
            try:
                return self._apply(path)
            except AssertionError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.2)

    def stop_queue(self, policy: str) -> None:
        """Set what the queue does: `None` (it admits), `Hold`, or `HoldAndDrain` (it evicts)."""
        change = json.dumps({"spec": {"stopPolicy": policy}})
        self.kubectl("patch", "clusterqueue", CLUSTER_QUEUE, "--type=merge", f"--patch={change}")

    def kubectl(self, *words: str) -> str:
        command = ["kubectl", f"--kubeconfig={self._config}", *words]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, f"{' '.join(words)}: {found.stderr}"
        return found.stdout

    def _apply(self, path: Path) -> None:
        self.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={path}")

    def _start(self) -> None:
        # /etc has these certificates for Kueue only.
        upper, work = self._folder / "etc", self._folder / "work"
        work.mkdir()
        certificates = Path(f"{upper}{METRICS.removeprefix('/etc')}")
        certificates.mkdir(parents=True)
        for name in ("tls.crt", "tls.key"):
            shutil.copy(self._folder / name, certificates)
        layers = f"lowerdir=/etc,upperdir={upper},workdir={work}"
        command = f'mount -t overlay overlay -o {layers} /etc && exec "$@"'
        with open(self._folder / "kueue.log", "ab") as log:
            self._running = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount"),
                    *("bash", "-c", command, "bash", str(self._built / "kueue")),
                    *(f"--config={self._folder / 'config.json'}", "--zap-log-level=2"),
                ],
                env={**os.environ, "KUBECONFIG": str(self._config)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _until_ready(self, address: str) -> None:
        deadline = time.monotonic() + UP_S
        while True:
            try:
                if httpx2.get(address).status_code == httpx2.codes.OK:
                    return
            except httpx2.HTTPError:
                pass
            assert self._running is not None
            assert self._running.poll() is None, f"Kueue has ended; see {self._folder}"
            assert time.monotonic() < deadline, f"Kueue is not ready; see {self._folder}"
            time.sleep(0.1)

    def _configure(self, webhook: int, health: int) -> dict[str, Any]:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"{HOST}:{health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": HOST, "port": webhook, "certDir": str(self._folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job", "pod"]},
            "featureGates": {"VisibilityOnDemand": False},
        }

    def _write_webhooks(self, address: str, authority: str) -> Path:
        """Write the webhooks with our address; those of Jobs, pods and Kueue's own types only."""
        found = []
        for each in yaml.safe_load_all((self._built / "webhooks.yaml").read_text()):
            kept = []
            for hook in each["webhooks"]:
                if not _is_needed(hook["rules"]):
                    continue
                path = hook["clientConfig"]["service"]["path"]
                bundle = _encode(authority)
                hook["clientConfig"] = {"url": f"{address}{path}", "caBundle": bundle}
                kept.append(hook)
            found.append({**each, "webhooks": kept})
        path = self._folder / "webhooks.yaml"
        path.write_text(yaml.safe_dump_all(found))
        return path

    def _queues(self) -> list[dict[str, Any]]:
        quota = {"name": "cpu", "nominalQuota": self._cores}
        group = {
            "coveredResources": ["cpu"],
            "flavors": [{"name": "default", "resources": [quota]}],
        }
        return [
            {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}},
            {
                "apiVersion": API,
                "kind": "ClusterQueue",
                "metadata": {"name": CLUSTER_QUEUE},
                "spec": {
                    "namespaceSelector": {},
                    "resourceGroups": [group],
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                },
            },
            {
                "apiVersion": API,
                "kind": "LocalQueue",
                "metadata": {"name": QUEUE, "namespace": "default"},
                "spec": {"clusterQueue": CLUSTER_QUEUE},
            },
            {
                "apiVersion": API,
                "kind": "WorkloadPriorityClass",
                "metadata": {"name": URGENT},
                "value": 1000,
            },
        ]


def _is_needed(rules: list[dict[str, Any]]) -> bool:
    resources = {
        (group, name) for rule in rules for group in rule["apiGroups"] for name in rule["resources"]
    }
    ours = {("", "pods"), ("batch", "jobs")}
    return any(each in ours or each[0] == "kueue.x-k8s.io" for each in resources)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
