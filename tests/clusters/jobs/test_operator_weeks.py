"""An operator's acts on real clusters, drawn from seeds: a job uses all hosts, and has equal bits.

HOLDFAST_WEEKS=A:B names the seeds; without it there are none. `make weeks` runs twenty for each
manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest

from conftest import finish
from holdfast.clusters.yarn.yarn_manager import open_manager
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.engine.fleet.cluster_manager import read_plan
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.lab.contracts.cluster_contract import serving_nodes
from labs import control_plane, yarn_lab
from labs.cluster_run import OPTIONS, SCRIPT, run_undisturbed
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import KubernetesCluster
from labs.kubernetes_run import JobHarness, KubernetesRun
from labs.operator_week import OperatorWeek
from labs.ray_cluster import RayCluster
from labs.slurm_cluster import SlurmCluster, our_processes
from labs.slurm_run import SlurmRun
from labs.yarn_lab import YarnLab
from support import until

# The number of steps, and the seconds that each takes until the acts are over: 20 minutes. After
# that the job runs as fast as it can.
STEPS = ("1500", "0.8")
HOSTS, NODES, ACTS = 4, 3, 8
END_S = 900.0  # the steps that are left, on a busy machine

first, _, end = os.environ.get("HOLDFAST_WEEKS", "0:0").partition(":")
SEEDS = range(int(first), int(end or int(first) + 1))

Acts = Mapping[str, Callable[[], Iterable[str]]]

pytestmark = [pytest.mark.slow, pytest.mark.clusters, pytest.mark.timeout(3600)]


class Watched(Protocol):
    """Is a run whose status can be asked for."""

    def status(self) -> dict[str, Any]: ...


def find_serving(run: Watched, observe: Callable[[], Sequence[Placement]]) -> dict[str, str]:
    """Return the hosts of the nodes that train; empty while the job or manager does not answer."""
    try:
        names = serving_nodes(run.status())
        held = [p for p in observe() if p.holding is Holding.RUNNING]
    except (HoldfastError, OSError, asyncio.TimeoutError, httpx2.HTTPError):
        return {}
    hosts = {str(p.id): p.host for p in held}
    return {name: hosts[name] for name in names} if set(names) <= set(hosts) else {}


ADVICE = "starts another service"  # where YARN keeps a host empty


class LaunchedJob:
    """Is a job whose launcher runs here, and may be killed and resumed."""

    nodes = NODES
    kept: Sequence[str] = ()

    def __init__(self, folder: Path, asked: Sequence[str]) -> None:
        self.go, self.folder = folder / "go", folder / "run"
        command = ("launch", *asked, "--host", "127.0.0.1", "--run-dir", str(self.folder))
        command += ("--nodes", str(NODES), "--nodes-min", "1", "--wait-for-nodes")
        command += ("--store", str(folder / "store"), "--save-every", "20", "--abandon-s", "8")
        self.run = LocalRun(self.folder, OPTIONS, [SCRIPT, str(self.go), *STEPS], command=command)
        self.more_acts: Acts = {
            "the fleet dies": self._lose_fleet,
            "the launcher dies and is resumed": self._resume,
        }

    def __enter__(self) -> LaunchedJob:
        self.run.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.run.__exit__(*exc)

    def serving(self) -> dict[str, str]:
        return find_serving(self.run, self.observe)

    def observe(self) -> Sequence[Placement]:
        """Return the nodes that the manager has."""
        raise NotImplementedError

    def lose(self, node: str) -> None:
        for pid in our_processes(f"HOLDFAST_PLACEMENT={node}"):
            strike(pid)

    def log(self) -> str:
        texts = [path.read_text()[-2000:] for path in self.folder.glob("logs/hf-*.txt")]
        return "\n".join([self.run.log(), *texts])

    def digest(self) -> str:
        """Let the job go on to its end, and return its digest; nothing is left."""
        self.go.touch()
        self.run.wait(END_S)
        # A manager may take some seconds to end the processes of a job that is over.
        until(lambda: not self.run.leftovers(), "the end of all processes of the job")
        finish(self.run)
        written = "\n".join(path.read_text() for path in self.folder.glob("logs/hf-*.txt"))
        (found,) = re.findall("^[0-9a-f]{64}$", written, re.MULTILINE)
        return str(found)

    def _lose_fleet(self) -> Iterable[str]:
        """Kill the process that asks for nodes, and wait until there is another one."""
        before = self._fleets()
        for pid in before:
            strike(pid)
        self.run.until(lambda: self._fleets() - before, END_S, "another process of the fleet")
        return ()

    def _fleets(self) -> set[int]:
        found = set()
        for pid in self.run.leftovers():
            with contextlib.suppress(OSError):
                if (
                    b"holdfast.engine.fleet.fleet_process"
                    in Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    found.add(pid)
        return found

    def _resume(self) -> Iterable[str]:
        nodes = self.serving()
        self.run.signal(signal.SIGKILL)
        self._go_on()
        return nodes

    def _go_on(self) -> None:
        """Resume the job, whose launcher has ended."""
        self.run.__exit__()
        self.run = LocalRun(self.folder, [], [], command=("resume", str(self.folder)))
        self.run.__enter__()


class YarnJob(LaunchedJob):
    """Is a job on a lab's ResourceManager."""

    # A host counts as lost after 10 s, its container and master after 10 s more each; where YARN
    # keeps a host empty, the job advises after a minute, and the operator follows.
    notice_s = 120.0

    def __init__(self, folder: Path, lab: YarnLab) -> None:
        super().__init__(folder, ("yarn", "--rm", lab.url, "--memory", "1024"))
        self.hosts, self._lab = lab.hosts, lab
        self.kill, self.away = lab.kill, lab.away

    def serving(self) -> dict[str, str]:
        """Look at the job; if it advises to stop and resume it, do so before."""
        if ADVICE in self.run.log():
            self.run.signal(signal.SIGTERM)
            self.run.wait(END_S)
            self._go_on()
        return super().serving()

    def observe(self) -> Sequence[Placement]:
        return asyncio.run(self._observe())

    async def _observe(self) -> Sequence[Placement]:
        manager = open_manager(read_plan(self.run.run_dir), self.run.run_dir.spec())
        try:
            return await asyncio.wait_for(manager.observe(), END_S)
        finally:
            await manager.close()

    def drain(self, host: str, reason: str) -> None:
        self._lab.drain(host)

    def bring_back(self, host: str) -> None:
        self._lab.bring_back(host)


@contextlib.contextmanager
def on_yarn(folder: Path) -> Iterator[YarnJob]:
    if why := yarn_lab.missing():
        pytest.skip(why)
    with YarnLab(folder / "yarn", hosts=HOSTS) as lab:
        job = YarnJob(folder, lab)
        with job:
            yield job


class SlurmJob:
    """Is a job of a lab's Slurm; the host of its script, where the coordinator runs, stays."""

    nodes = NODES
    notice_s = 30.0

    def __init__(self, folder: Path, slurm: SlurmCluster) -> None:
        store = ("--store", str(folder / "store"), "--save-every", "20", "--abandon-s", "8")
        nodes = ("--nodes", str(NODES), "--nodes-min", "1")
        self.job = SlurmRun(folder, slurm, *nodes, *store, steps=STEPS)
        self._slurm, self.kill, self.away = slurm, slurm.kill, slurm.away
        self.more_acts: Acts = {"the job is requeued": self._requeue}

    def __enter__(self) -> SlurmJob:
        self.job.run.__enter__()
        self.job.begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.run.__exit__(*exc)

    @property
    def hosts(self) -> Sequence[str]:
        return self._slurm.hosts

    @property
    def kept(self) -> Sequence[str]:
        return [self.job.script_host()]

    def serving(self) -> dict[str, str]:
        self._slurm.resume_blamed()
        return find_serving(self.job.run, lambda: asyncio.run(self._observe()))

    async def _observe(self) -> Sequence[Placement]:
        manager = self._slurm.manager("hf-")
        return await asyncio.wait_for(manager.observe(), END_S)

    def drain(self, host: str, reason: str) -> None:
        self._slurm.drain(host, reason)

    def bring_back(self, host: str) -> None:
        self._slurm.bring_back(host)

    def lose(self, node: str) -> None:
        for pid in self._slurm.processes(PlacementId(node)):
            strike(pid)

    def log(self) -> str:
        return self.job.log()

    def digest(self) -> str:
        found = self.job.digest(END_S)
        assert not self.job.further_jobs()
        return found

    def _requeue(self) -> Iterable[str]:
        nodes = self.serving()
        self._slurm.slurm("scontrol", "requeue", self._slurm.allocation)
        return nodes


@contextlib.contextmanager
def on_slurm(folder: Path) -> Iterator[SlurmJob]:
    if why := SlurmCluster.missing():
        pytest.skip(why)
    with SlurmCluster(folder / "slurm", hosts=HOSTS) as slurm, SlurmJob(folder, slurm) as job:
        yield job


class RayJob(LaunchedJob):
    """Is a job on a lab's Ray."""

    notice_s = 60.0

    def __init__(self, folder: Path, ray: RayCluster) -> None:
        super().__init__(folder, ("ray", "--address", ray.address, "--cpus", "0.5"))
        self.hosts, self._ray = ray.hosts, ray
        self.kill, self.away, self.bring_back = ray.kill, ray.away, ray.bring_back

    def observe(self) -> Sequence[Placement]:
        return self._ray.tables().placements("hf-", 0.0, 0.0)

    def drain(self, host: str, reason: str) -> None:
        self._ray.drain(host, reason, within_s=30.0)


@contextlib.contextmanager
def on_ray(folder: Path) -> Iterator[RayJob]:
    if why := RayCluster.missing():
        pytest.skip(why)
    with RayCluster(hosts=HOSTS) as ray:
        job = RayJob(folder, ray)
        with job:
            yield job


class KubernetesJob:
    """Is a job of a lab's Kubernetes, whose coordinator has a pod as well."""

    nodes = NODES
    kept: Sequence[str] = ()
    # A node is unreachable after 8 s, and its pods are deleted after 30 s; a lost coordinator
    # comes back after the back-off of its Job.
    notice_s = 120.0

    def __init__(self, cluster: KubernetesCluster) -> None:
        store = ("--store", str(cluster.folder / "store"), "--save-every", "20")
        self.hosts, self._cluster = cluster.hosts, cluster
        self.kill, self.away, self.drain = cluster.kill, cluster.away, cluster.drain
        self.run = KubernetesRun(cluster, "--nodes", str(NODES), "--nodes-min", "1", *store)
        self._go = cluster.folder / "go"
        self.run.launch(SCRIPT, str(self._go), *STEPS)
        self.more_acts: Acts = {"the coordinator's pod is deleted": self._lose_coordinator}

    def serving(self) -> dict[str, str]:
        observer = JobHarness(self.run)
        return find_serving(self.run, lambda: asyncio.run(observer.observe()))

    def bring_back(self, host: str) -> None:
        self._cluster.bring_back(host)

    def lose(self, node: str) -> None:
        for pid in self._cluster.processes(PlacementId(node)):
            strike(pid)

    def log(self) -> str:
        return self.run.log()

    def digest(self) -> str:
        self._go.touch()
        return self.run.finish(END_S)

    def _lose_coordinator(self) -> Iterable[str]:
        before = self.run.coordinator()
        self._cluster.delete(before)
        self._cluster.until(lambda: self.run.coordinator() != before, "another coordinator", END_S)
        return ()


@contextlib.contextmanager
def on_kubernetes(folder: Path) -> Iterator[KubernetesJob]:
    if why := control_plane.missing():
        pytest.skip(why)
    with ControlPlane(folder) as plane:
        config = plane.config
        with KubernetesCluster(folder, config, plane.away, nodes=HOSTS) as cluster:
            yield KubernetesJob(cluster)


Opened = Callable[[Path], contextlib.AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), *STEPS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on", [on_yarn, on_slurm, on_ray, on_kubernetes])
def test_a_job_has_equal_bits_after_a_week_of_an_operator(
    on: Opened, seed: int, tmp_path: Path, undisturbed: str
) -> None:
    with on(tmp_path) as job:
        week = OperatorWeek(job, seed)
        try:
            week.work(ACTS)
            assert job.digest() == undisturbed
        finally:
            print("\n".join(week.diary))
