"""Launches jobs in a cluster of the kit, and watches them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job

from conftest import SCRIPTS
from holdfast.cli.main import main
from holdfast.clusters.kubernetes.kubectl import COMPLETE, FAILED
from holdfast.clusters.kubernetes.kubernetes_manifests import COORDINATOR
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.fleet.placements import Placement, PlacementId
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.rundir import RunDir
from holdfast.lab.contracts.cluster_contract import serving_nodes
from labs.etcd_cluster import free_ports
from labs.kubernetes_cluster import KubernetesCluster, read_manifests

STEP_S = 240.0


class KubernetesRun:
    """Launches a job in a cluster whose nodes share this machine's files, and watches it."""

    def __init__(self, cluster: KubernetesCluster, *options: str) -> None:
        self.cluster = cluster
        self.run_dir = RunDir(cluster.folder / "volume" / "run")
        self.name = ""
        self._options = options
        self._coordinator = ""
        self.tls: Path | None = None

    def launch(self, *script: str) -> None:
        command = ["launch", "k8s", *self.where(), *self._options]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([*command, "--nproc", "1", "--virtual", "4", *script]) == 0
        objects = read_manifests(printed.getvalue())
        if objects:
            self.name = objects[0]["metadata"]["name"]
        self.cluster.apply([*objects, volume(self.cluster.folder)])

    def where(self) -> list[str]:
        """Return the options for the places of pods. All are processes of this machine."""
        port = str(free_ports(1)[0])
        words = ["--image", "none", "--workdir", str(SCRIPTS), "--port", port]
        return [*words, "--host", "127.0.0.1", "--run-dir", str(self.run_dir.path)]

    @property
    def prefix(self) -> str:
        return f"{self.name}-"

    def status(self) -> dict[str, Any]:
        return job_status(self.run_dir, client_of(self.tls)).to_dict()

    def until(self, ready: Callable[[], Any], timeout_s: float, what: str) -> Any:
        try:
            return self.cluster.until(ready, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def serving(self) -> list[str]:
        """Return the agents that have work; none while some agent does not answer."""
        with contextlib.suppress(HoldfastError, OSError):
            return serving_nodes(self.status())
        return []

    def host(self, pod: str) -> str:
        """Return the node of one of the job's pods, which may be the coordinator's."""
        pods = {**self.cluster.pods(self.prefix), **self.cluster.pods(self.prefix, COORDINATOR)}
        found: str = pods[pod]["spec"]["nodeName"]
        return found

    def until_saved(self) -> None:
        """Wait until a checkpoint counts."""
        self.until(lambda: " is saved" in self.run_dir.events.read_text(), STEP_S, "a checkpoint")

    def coordinator(self) -> str:
        """Return the coordinator's pod, the newest that is not being deleted."""
        found = self.cluster.pods(self.prefix, COORDINATOR)
        left = [name for name, p in found.items() if "deletionTimestamp" not in p["metadata"]]
        running = [name for name in left if found[name]["status"].get("phase") == "Running"]
        self._coordinator = running[0] if running else self._coordinator
        return self._coordinator

    def until_replaced(self, gone: str) -> None:
        def replaced() -> bool:
            serving = self.serving()
            return len(serving) == 3 and gone not in serving

        self.until(replaced, STEP_S, f"another node in place of {gone}")

    def processes(self, module: str) -> list[int]:
        """Return the processes of the coordinator's pod that run a module."""
        pids = self.cluster.processes(PlacementId(self.coordinator()))
        return [p for p in pids if module in Path(f"/proc/{p}/cmdline").read_text().split("\0")]

    def ended(self, within_s: float = STEP_S) -> str:
        """Wait for the end of the Job, and return how it ended.

        It may have pods on a lost node. Until this is back or removed, Kubernetes 1.31 and newer
        gives the Job the first condition of a pair only (kubectl.py).
        """

        def end() -> str | None:
            job = self.cluster.client.get(Job, self.name).to_dict()
            conditions = job.get("status", {}).get("conditions", ())
            found = {each["type"] for each in conditions if each["status"] == "True"}
            return next((pair[1] for pair in (COMPLETE, FAILED) if found & set(pair)), None)

        found: str = self.until(end, within_s, "the end of the Job")
        return found

    def finish(self, within_s: float = STEP_S) -> str:
        """Wait until the Job is complete; return the last line of the workers' output."""
        assert self.ended(within_s) == "Complete", self.log()
        self.cluster.until(lambda: not self.alive(), "no pod is left")
        lines = re.findall("^[0-9a-f]{64}$", self.printed(), re.MULTILINE)
        assert len(lines) == 1, self.log()
        return lines[0]

    def alive(self) -> list[str]:
        """Return the agents' pods whose processes run."""
        return [
            pod
            for pod in self.cluster.pods(self.prefix)
            if self.cluster.processes(PlacementId(pod))
        ]

    def printed(self) -> str:
        """Return the whole output of the job's pods."""
        paths = (self.cluster.folder / "pods").glob(f"{self.name}-*.log")
        return "\n".join(path.read_text() for path in paths)

    def log(self) -> str:
        paths = sorted((self.cluster.folder / "pods").glob("*.log"))
        return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in paths)


class JobHarness:
    """Is the harness of the contract suite for one job, whatever prefix the suite asks for."""

    def __init__(self, run: KubernetesRun) -> None:
        self._run = run
        self.hosts, self.kill, self.drain = run.cluster.hosts, run.cluster.kill, run.cluster.drain
        self.domains = run.cluster.domains
        self.away, self.processes = run.cluster.away, run.cluster.processes

    def manager(self, job: str = "") -> Any:
        return self

    async def observe(self) -> Sequence[Placement]:
        """List the job's placements, each time by a new adapter."""
        manager = self._run.cluster.manager(self._run.prefix)
        try:
            return await manager.observe()
        finally:
            await manager.close()


def volume(folder: Path) -> dict[str, Any]:
    """Return a volume for the coordinator's claim."""
    spec = {
        "capacity": {"storage": "10Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(folder / "volume")},
    }
    about = {"name": "volume"}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": about, "spec": spec}
