"""Plays the operator of a small Kubernetes cluster, real or faked: a harness of the contract suite.

The nodes are kubelets of the test kit (kubelet.py), each a process of its own, or real ones
(container_node.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx2
import yaml
from lightkube import ApiError, AsyncClient, Client, KubeConfig
from lightkube.codecs import from_dict
from lightkube.resources.core_v1 import Node, Pod
from lightkube.types import PatchType
from typing_extensions import Self

from holdfast.clusters.kubernetes.kubernetes_manager import KubernetesManager
from holdfast.clusters.kubernetes.kubernetes_manifests import AGENT, ZONE, instance_of, labels_of
from holdfast.clusters.kubernetes.kubernetes_notices import REASON
from holdfast.engine.core.errors import Refused
from holdfast.engine.core.fleet.placements import PlacementId
from labs import kubelet
from labs.kubelet import NODE_MARK, POD_MARK, UNMOUNTABLE, kill_marked, marked, name_in

NAMESPACE = "default"
UP_S = 60.0
AWAY_S = 1  # a node that is unreachable for this long loses its pods
PREFIX = "hf-fake-"


class LabNode(Protocol):
    """Is what a cluster of the tests does to one of its nodes."""

    def start(self) -> None:
        """Start the node's kubelet."""

    def kill(self) -> None:
        """End the node with all its processes, without notice."""

    def remove(self) -> None:
        """Kill the node, and remove its files and mounts."""

    def send(self, signal_: signal.Signals) -> None:
        """Send a signal to the kubelet alone."""


class KitNode:
    """Runs a kubelet of the test kit; pods are processes. It knows none of those there before.

    `more`: variables that all of its pods get.
    """

    def __init__(
        self,
        host: str,
        zone: str,
        folder: Path,
        config: Path,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._host = host
        self._zone = zone
        self._folder = folder
        self._config = config
        self._more = dict(more or {})
        self._kubelet: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._kubelet is not None:
            return
        command = [sys.executable, str(Path(kubelet.__file__)), self._host, "--zone", self._zone]
        found = [str(Path(kubelet.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._kubelet = subprocess.Popen(
            [
                *(*command, "--root", str(self._folder)),
                f"--pods-environment={json.dumps(self._more)}",
            ],
            env={
                **os.environ,
                "KUBECONFIG": str(self._config),
                "PYTHONPATH": os.pathsep.join(filter(None, found)),
            },
            stdin=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self._kubelet is not None:
            self._kubelet.kill()
            self._kubelet.wait()
            self._kubelet = None
        kill_marked(NODE_MARK, name_in(self._folder, self._host))

    def remove(self) -> None:
        self.kill()

    def send(self, signal_: signal.Signals) -> None:
        assert self._kubelet is not None
        self._kubelet.send_signal(signal_)


class KubernetesCluster:
    """Runs some nodes against an API, and disturbs them; used as a context manager.

    `away`: ends the control plane's servers (True), and starts them again. `make_node`: makes a
    node from its name and its zone; without it nodes are the kit's.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        away: Callable[[bool], None],
        nodes: int = 3,
        make_node: Callable[[str, str], LabNode] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.hosts = tuple(f"node{number}" for number in range(nodes))
        self.domains = {h: (f"{ZONE}=zone{i % 2}",) for i, h in enumerate(self.hosts)}
        self.away = away
        make = make_node or (lambda host, zone: KitNode(host, zone, folder, config))
        self._nodes = {h: make(h, f"zone{i % 2}") for i, h in enumerate(self.hosts)}

    def __enter__(self) -> Self:
        for host in self.hosts:
            self.start(host)
        self.until(lambda: len(self.ready()) == len(self.hosts), "all nodes are ready")
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self._nodes.values():
            node.remove()

    @functools.cached_property
    def client(self) -> Client:
        return Client(KubeConfig.from_file(self.config), namespace=NAMESPACE)

    def manager(self, job: str = PREFIX) -> KubernetesManager:
        """Make an adapter, and the objects that a launch would have made."""
        self.apply(contract_objects(job))
        client = AsyncClient(KubeConfig.from_file(self.config), namespace=NAMESPACE)
        return KubernetesManager(client, NAMESPACE, job, ZONE)

    def apply(self, objects: list[dict[str, Any]]) -> None:
        """Create objects that are missing."""
        for each in objects:
            code = self._create(each)
            assert code in (0, 409), f"{each['kind']}: {code}"

    def _create(self, found: dict[str, Any]) -> int:
        """Return the status of an error, or 0."""
        create: Any = self.client.create
        try:
            create(from_dict(found))
        except ApiError as error:
            return int(error.response.status_code)
        return 0

    # ------------------------------------------------------------ nodes

    def start(self, host: str) -> None:
        """Start the kubelet of a node, unless it runs."""
        self._nodes[host].start()

    def kill(self, host: str) -> None:
        """End a node with all its processes, without notice."""
        self._nodes[host].kill()

    def freeze(self, host: str) -> None:
        """Stop a node's kubelet but not its processes: the control plane cannot reach the node."""
        self._nodes[host].send(signal.SIGSTOP)

    def break_mounts(self, host: str, broken: bool = True) -> None:
        """Stop a node from mounting volumes, so that it starts no pod; or allow it again."""
        folder = self.folder / UNMOUNTABLE
        folder.mkdir(exist_ok=True)
        if broken:
            (folder / host).touch()
        else:
            (folder / host).unlink(missing_ok=True)

    def thaw(self, host: str) -> None:
        """Continue a frozen kubelet."""
        self._nodes[host].send(signal.SIGCONT)

    def drain(self, host: str, reason: str) -> None:
        """Cordon a node, and record the reason."""
        about = {"annotations": {REASON: reason}}
        self._patch_node(host, {"metadata": about, "spec": {"unschedulable": True}})

    def bring_back(self, host: str) -> None:
        """Make a node that was killed or drained take part again."""
        self._patch_node(host, {"spec": {"unschedulable": None}})
        self.start(host)

    def taint(self, host: str, key: str, effect: str) -> None:
        self._patch_node(host, {"spec": {"taints": [{"key": key, "effect": effect}]}})

    def untaint(self, host: str) -> None:
        self._patch_node(host, {"spec": {"taints": None}})

    def _patch_node(self, host: str, change: dict[str, Any]) -> None:
        self.client.patch(Node, host, change, patch_type=PatchType.MERGE)

    def ready(self) -> list[str]:
        """Return the nodes on which pods can be started."""
        found = []
        for each in (node.to_dict() for node in self.client.list(Node)):
            conditions = each["status"].get("conditions", ())
            up = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            if up and not each.get("spec", {}).get("taints"):
                found.append(each["metadata"]["name"])
        return found

    # ------------------------------------------------------------ pods

    def processes(self, id_: PlacementId) -> list[int]:
        return marked(POD_MARK, name_in(self.folder, id_))

    def pods(self, job: str, component: str = AGENT) -> dict[str, dict[str, Any]]:
        labels: Any = labels_of(job, component)
        found = self.client.list(Pod, labels=labels)
        return {
            pod.metadata.name: pod.to_dict() for pod in found if pod.metadata and pod.metadata.name
        }

    def delete(self, pod: str) -> None:
        """Delete a pod, as `kubectl delete pod` does."""
        self.client.delete(Pod, pod)

    def evict(self, pod: str) -> None:
        """Ask for a pod's eviction, as `kubectl drain` does. Refused: its budget forbids it."""
        config = json.loads(self.config.read_text())
        server = config["clusters"][0]["cluster"]
        authority = server.get("certificate-authority")
        trust = ssl.create_default_context(cafile=authority) if authority else True
        token = config["users"][0]["user"].get("token", "")
        about = {"name": pod, "namespace": NAMESPACE}
        answer = httpx2.post(
            f"{server['server']}/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction",
            json={"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about},
            headers={"Authorization": f"Bearer {token}"},
            verify=trust,
        )
        if answer.is_error:
            raise Refused(str(answer.json()["message"]))

    def until(self, ready: Callable[[], Any], what: str, within_s: float = UP_S) -> Any:
        """Look until something is true; the API may be away in that time."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if found := ready():
                    return found
            assert time.monotonic() < deadline, f"not in {within_s:g} s: {what}"
            time.sleep(0.05)


def contract_objects(job: str) -> list[dict[str, Any]]:
    """Return the objects of a job that consists of placements only."""
    name, labels = instance_of(job), labels_of(job, AGENT)
    about = {"name": name, "namespace": NAMESPACE, "labels": labels_of(job)}
    alone = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}
    spec = {
        "containers": [{"name": AGENT, "image": "none"}],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "affinity": {"podAntiAffinity": required},
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{what}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": AWAY_S,
            }
            for what in ("not-ready", "unreachable")
        ],
    }
    idle = {"containers": [{"name": "none", "image": "none"}], "restartPolicy": "Never"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": about,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": about,
            "spec": {"parallelism": 0, "backoffLimit": 0, "template": {"spec": idle}},
        },
    ]


def write_kubeconfig(path: Path, url: str, token: str = "", authority: Path | None = None) -> Path:
    """Write the address and key of an API. JSON is YAML."""
    cluster: dict[str, Any] = {"server": url}
    if authority is None:
        cluster["insecure-skip-tls-verify"] = True  # else each client reads all authorities
    else:
        cluster["certificate-authority"] = str(authority)
    found = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(found))
    return path


def read_manifests(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))
