"""Launches jobs whose pods are containers on real kubelets, and watches them with `kubectl`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.engine.core.fleet.placements import PlacementId
from labs.commands import run_kubectl
from labs.container_node import ContainerNode, program
from labs.containers import SITE, site_packages
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import NAMESPACE, KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun
from labs.pod_network import PodNetwork

RUN_DIR, SIGNALS = "/holdfast/run", "/signals"
# How containerd begins each line of a container: the time, the stream, and whether it is whole.
HEAD = re.compile(r"^\S+ (?:stdout|stderr) [FP] ", re.MULTILINE)


class ContainerCluster(KubernetesCluster):
    """Runs real kubelets, and finds pods' processes by their control groups."""

    def __init__(
        self, plane: ControlPlane, network: PodNetwork, images: Sequence[Path], nodes: int
    ) -> None:
        folder = plane.folder
        self._machines: dict[str, ContainerNode] = {}

        def make(host: str, zone: str) -> ContainerNode:
            place = folder / "nodes" / host
            node = ContainerNode(place, host, zone, network, plane.config, images)
            self._machines[host] = node
            return node

        super().__init__(folder, plane.config, plane.away, nodes, make)

    def shut_down(self, host: str) -> None:
        """Shut a machine down, as its operator does: the kubelet ends its pods first."""
        self._machines[host].shut_down()

    def processes(self, id_: PlacementId) -> list[int]:
        mark, found = f"HOSTNAME={id_}".encode(), []
        for pid in (pid for node in self._machines.values() for pid in node.processes()):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def printed(self, pod: str) -> str:
        """Return the output of all containers in pods whose names begin with `pod`."""
        paths = self.folder.glob(f"nodes/*/logs/{NAMESPACE}_{pod}*/*/*.log")
        return "".join(HEAD.sub("", path.read_text()) for path in sorted(paths))

    def kubectl(self, *words: str) -> str:
        return run_kubectl(self.config, *words)


@contextlib.contextmanager
def open_cluster(folder: Path, images: Sequence[Path], nodes: int) -> Iterator[ContainerCluster]:
    """Run a control plane and nodes. `folder`: its path is short, since sockets are below it."""
    with (
        keep_settings(),
        PodNetwork(folder, program("coredns")) as network,
        ControlPlane(folder, network) as plane,
    ):
        network.start_dns(plane.config)
        with ContainerCluster(plane, network, images, nodes) as cluster:
            yield cluster


@contextlib.contextmanager
def keep_settings() -> Iterator[None]:
    """Restore the settings of this machine's kernel that each kubelet changes."""
    paths = [
        Path("/proc/sys", *name.split("."))
        for name in ("vm.overcommit_memory", "kernel.panic", "kernel.panic_on_oops")
    ]
    before = [path.read_text() for path in paths]
    try:
        yield
    finally:
        for path, text in zip(paths, before, strict=True):
            path.write_text(text)


def mount_shared(*more: tuple[str, Path]) -> tuple[list[Any], list[Any]]:
    """Return a container's mounts and a pod's volumes: folders of this machine, and torch."""
    mounts, volumes = [], []
    for place, folder in ((SITE, site_packages()), *more):
        name = place.strip("/")
        mounts.append({"name": name, "mountPath": place, "readOnly": place == SITE})
        volumes.append({"name": name, "hostPath": {"path": str(folder)}})
    return mounts, volumes


class ContainerRun(KubernetesRun):
    """Launches a job in containers.

    `agent`: further fields of agents' containers. `tls`: the folder of the certificates in the
    coordinator's pod.
    """

    def __init__(
        self,
        cluster: ContainerCluster,
        image: str,
        *options: str,
        agent: Mapping[str, Any] | None = None,
        tls: str = "",
    ) -> None:
        self.containers = cluster
        self._image = image
        self._certificates = ["--tls", tls] if tls else []
        self.signals = cluster.folder / "signals"
        for folder in (self.signals, cluster.folder / "volume"):
            folder.mkdir()
            folder.chmod(0o777)
        words = ["--nodes", "2", "--drain-s", "10"]
        for option, name, more in (
            ("--pod", "agent", agent or {}),
            ("--coordinator-pod", "coordinator", {}),
        ):
            mounts, volumes = mount_shared((SIGNALS, self.signals))
            container = {"name": name, "volumeMounts": mounts, **more}
            template = cluster.folder / f"{name}.json"
            template.write_text(
                json.dumps({"spec": {"containers": [container], "volumes": volumes}})
            )
            words += [option, str(template)]
        super().__init__(cluster, *words, *options)

    @property
    def go(self) -> Path:
        return self.signals / "go"

    def where(self) -> list[str]:
        return ["--image", self._image, "--workdir", "/workspace", "--run-dir", RUN_DIR]

    def ask(self, pod: str, *command: str) -> str:
        """Run a command in a pod; return its output."""
        return self.containers.kubectl("exec", pod, "--", *command)

    def status(self) -> dict[str, Any]:
        words = ["holdfast", "status", "--run-dir", RUN_DIR, "--json", *self._certificates]
        shown = self.ask(f"job/{self.name}", *words)
        found: dict[str, Any] = json.loads(shown)
        return found

    def events(self) -> list[str]:
        if not self.run_dir.events.exists():
            return []
        lines = self.run_dir.events.read_text().splitlines()
        return [str(json.loads(line)["text"]) for line in lines]

    def worker(self, pod: str) -> int:
        """Return the number of a pod's worker."""
        return next(int(w["id"]) for w in self.status()["workers"] if w["agent"] == pod)

    def until_said(self, text: str) -> str:
        def said() -> str:
            lines = [*self.events(), *self.printed().splitlines()]
            return next((line for line in lines if re.search(text, line)), "")

        found: str = self.until(said, STEP_S, text)
        return found

    def printed(self) -> str:
        return self.containers.printed(self.name)

    def log(self) -> str:
        logs = sorted(self.cluster.folder.glob("nodes/*/kubelet.log"))
        parts = [f"-- {path}\n{path.read_text()[-2000:]}" for path in logs]
        return "\n".join([self.printed()[-12000:], *parts])
