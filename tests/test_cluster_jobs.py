"""Jobs on YARN and Mesos survive what happens to hosts, nodes, masters and launchers, on fakes.

The last tests use a real ResourceManager on this machine: one that they start from Hadoop's jars,
or the one that HOLDFAST_YARN_RM names (docs/yarn.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from conftest import SCRIPTS, finish
from holdfast.core.errors import HoldfastError
from holdfast.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.launch.fleet_plan import read_plan
from holdfast.launch.yarn_manager import open_manager
from holdfast.testing.cluster_contract import (
    CLUSTER_CASES,
    Case,
    a_drained_host_is_announced,
    a_killed_host_loses_its_placement_only,
    a_manager_that_is_away_is_an_error,
    assert_survives,
    run_cluster_case,
    serving_nodes,
    two_placements_have_hosts_of_their_own,
)
from holdfast.testing.local_run import LocalRun, strike
from labs.fake_mesos import FakeMesos
from labs.fake_yarn import FakeYarn
from labs.slurm_cluster import our_processes
from labs.yarn_cluster import RM_VARIABLE, YarnCluster
from labs.yarn_lab import YarnLab, missing

SCRIPT, STEPS = str(SCRIPTS / "paced.py"), "600"
OPTIONS = ["--nproc", "1", "--virtual", "4"]
JOB_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class ClusterRun:
    """Runs a job that goes on slowly until it is let go, on the nodes of a cluster manager.

    `asked`: the words after `holdfast launch`, which name the manager and where it is.
    """

    def __init__(self, tmp_path: Path, asked: Sequence[str], *options: str) -> None:
        self.go, self.folder = tmp_path / "go", tmp_path / "run"
        command = ("launch", *asked, "--host", "127.0.0.1", "--memory", "1024")
        command += ("--run-dir", str(self.folder), *options)
        script = [SCRIPT, str(self.go), STEPS]
        self.run = LocalRun(self.folder, OPTIONS, script, command=command)

    def serving(self, number: int, without: Sequence[str] = ()) -> list[str]:
        """Wait until that number of agents train, and none in `without`; return their names."""

        def complete() -> list[str]:
            with contextlib.suppress(HoldfastError, OSError):
                found = serving_nodes(self.run.status())
                return found if len(found) == number and not set(without) & set(found) else []
            return []

        found: list[str] = self.until(complete, f"{number} nodes without {without}")
        return found

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        try:
            return self.run.until(ready, JOB_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.written()}") from None

    def written(self) -> str:
        """Return what agents and workers have printed."""
        return "\n".join(path.read_text() for path in self.folder.glob("logs/hf-*.txt"))

    def digest(self) -> str:
        """Let the job go on to its end, and return its digest; nothing is left."""
        self.go.touch()
        finish(self.run)
        (found,) = re.findall("^[0-9a-f]{64}$", self.written(), re.MULTILINE)
        return str(found)

    def lose(self, name: str) -> None:
        """Kill all processes of a node's agent, and its container or task with them."""
        for pid in our_processes(f"HOLDFAST_PLACEMENT={name}"):
            strike(pid)

    def lose_fleet(self) -> None:
        """Kill the process that asks the manager for nodes."""
        strike(self.until(self._fleet, "the fleet's process"))

    def _fleet(self) -> int:
        for pid in self.run.leftovers():
            with contextlib.suppress(OSError):
                if b"holdfast.launch.fleet_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0


class Observer(Protocol):
    async def observe(self) -> Sequence[Placement]: ...


@dataclass(slots=True, kw_only=True)
class FakeCluster:
    """Describes a fake of some manager to the tests.

    `observer`: lists the nodes of a run; `upset`: the manager's own master starts again, or another
    one leads; `held`: the services or frameworks that are still there.
    """

    fake: FakeYarn | FakeMesos
    asked: Sequence[str]
    observer: Callable[[ClusterRun], Observer]
    upset: Callable[[], None]
    held: Callable[[], Sequence[str]]


class JobHarness:
    """Is the harness of the contract suite for one job on a fake."""

    def __init__(self, cluster: FakeCluster, job: ClusterRun) -> None:
        fake = cluster.fake
        self.hosts, self.domains = fake.hosts, fake.domains
        self.manager = lambda name: cluster.observer(job)
        self.kill, self.drain, self.away = fake.kill, fake.drain, fake.away
        self.processes = fake.processes


class MesosObserver:
    """Lists a job's tasks as the fake knows them: Mesos has one subscriber, which is the fleet."""

    def __init__(self, fake: FakeMesos) -> None:
        self._fake = fake

    async def observe(self) -> list[Placement]:
        with self._fake.lock:
            found = [t for f in self._fake.frameworks.values() for t in f.tasks.values()]
        return [
            Placement(
                id=PlacementId(task.id),
                handle=task.agent.id,
                holding=Holding.RUNNING if task.state == "TASK_RUNNING" else Holding.ENDED,
                host=task.agent.host,
            )
            for task in found
        ]


@contextlib.contextmanager
def fake_yarn(folder: Path) -> Iterator[FakeCluster]:
    with FakeYarn(folder, hosts=6) as fake:

        def upset() -> None:
            (service,) = fake.services.values()
            fake.restart_master(service, within_s=2.0)

        yield FakeCluster(
            fake=fake,
            asked=("yarn", "--rm", fake.url),
            observer=lambda job: open_manager(read_plan(job.run.run_dir), job.run.run_dir.spec()),
            upset=upset,
            held=lambda: list(fake.services),
        )


@contextlib.contextmanager
def fake_mesos(folder: Path) -> Iterator[FakeCluster]:
    with FakeMesos(folder, hosts=6, masters=2) as fake:
        yield FakeCluster(
            fake=fake,
            asked=("mesos", "--master", fake.url),
            observer=lambda job: MesosObserver(fake),
            upset=lambda: fake.fail_over(known_in_s=2.0),
            held=lambda: list(fake.frameworks),
        )


@pytest.fixture(params=[fake_yarn, fake_mesos])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeCluster]:
    with request.param(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    with LocalRun(folder / "run", OPTIONS, [SCRIPT, str(folder / "go"), STEPS]) as run:
        return finish(run)


def test_a_job_survives_a_killed_and_a_drained_host(
    tmp_path: Path, cluster: FakeCluster, undisturbed: str
) -> None:
    job = ClusterRun(tmp_path, cluster.asked, "--nodes", "3")
    with job.run:
        job.serving(3)
        harness: Any = JobHarness(cluster, job)
        assert_survives(job.run, harness, job.go.touch)
        assert job.digest() == undisturbed
    assert not cluster.held()
    # The fleet says this once of each node; a worker that is late may hide the event of the job.
    assert sum(" is drained: " in line for line in job.run.err) == 1, job.run.err


def test_a_job_survives_a_lost_node_another_master_and_its_fleets_death(
    tmp_path: Path, cluster: FakeCluster, undisturbed: str
) -> None:
    job = ClusterRun(tmp_path, cluster.asked, "--nodes", "3")
    with job.run:
        first = job.serving(3)
        job.lose(first[0])
        second = job.serving(3, without=first[:1])
        cluster.upset()
        job.lose_fleet()
        job.lose(second[0])
        job.serving(3, without=[*first[:1], *second[:1]])
        assert job.digest() == undisturbed
    assert not cluster.held()


def test_a_launcher_that_is_killed_is_resumed(
    tmp_path: Path, cluster: FakeCluster, undisturbed: str
) -> None:
    store = ("--store", str(tmp_path / "store"), "--save-every", "10", "--abandon-s", "8")
    job = ClusterRun(tmp_path, cluster.asked, "--nodes", "3", *store)
    with job.run:
        before = job.serving(3)
        # The first is surely in the coordinator's journal when the second one is told.
        job.until(lambda: sum("is saved" in line for line in job.run.err) > 1, "two checkpoints")
        os.kill(job.run.pid, signal.SIGKILL)
    job.run = LocalRun(job.folder, [], [], command=("resume", str(job.folder)))
    with job.run:
        assert not set(job.serving(3, without=before)) & set(before)
        assert job.digest() == undisturbed
    assert not cluster.held()
    begun = [event["text"] for event in job.run.events("view")]
    assert any("from the checkpoint of step" in text for text in begun), begun


def test_an_interrupted_job_gives_all_back(tmp_path: Path, cluster: FakeCluster) -> None:
    job = ClusterRun(tmp_path, cluster.asked, "--nodes", "2")
    with job.run:
        names = job.serving(2)
        job.run.signal(signal.SIGINT)
        assert job.run.wait(JOB_S) == 130
    assert not cluster.held()
    assert not [pid for name in names for pid in cluster.fake.processes(PlacementId(name))]


def test_a_service_that_an_operator_ends_ends_its_job(tmp_path: Path, undisturbed: str) -> None:
    with fake_yarn(tmp_path) as cluster:
        fake: Any = cluster.fake
        assert_ends_with_its_service(tmp_path, cluster.asked, undisturbed, fake.stop)
        assert len(fake.applications) == 2  # the second one is of the command that resumes
        assert not fake.services


def assert_ends_with_its_service(
    folder: Path, asked: Sequence[str], undisturbed: str, stop: Callable[[str], None]
) -> None:
    """Run a job whose service is stopped, and resume it. `stop`: as an operator, by its name."""
    store = ("--store", str(folder / "store"), "--save-every", "10")
    job = ClusterRun(folder, asked, "--nodes", "2", "--wait-for-nodes", *store)
    with job.run:
        job.serving(2)
        name = job.run.run_dir.spec().job[:8]
        stop(f"hf-{name}")
        assert job.run.wait(JOB_S) == 1
    said = f"YARN has ended service hf-{name}, as by `yarn app -stop hf-{name}` (Stopped by user "
    reason = [line for line in job.run.err if said in line]
    assert any("the job ends" in line for line in reason), job.run.err
    assert any(f"`holdfast resume {job.folder}` continues it" in line for line in reason), reason
    job.run = LocalRun(job.folder, [], [], command=("resume", str(job.folder)))
    with job.run:
        job.serving(2)
        assert job.digest() == undisturbed


def test_nodes_that_a_full_cluster_does_not_give_are_reported(tmp_path: Path) -> None:
    with fake_yarn(tmp_path) as cluster:
        fake: Any = cluster.fake
        fake.hosts, fake.blind = fake.hosts[:2], {"nm1"}
        asked = ("--nodes", "2", "--nodes-min", "1", "--wait-for-nodes")
        job = ClusterRun(tmp_path, cluster.asked, *asked)
        with job.run:
            job.serving(1)
            for reason in (
                "YARN says of nm0: Queue does not",
                "nm1 does not see the run directory",
            ):
                job.until(lambda text=reason: any(text in line for line in job.run.err), reason)
            job.go.touch()
            finish(job.run)
        first = next(line for line in job.run.err if "YARN gives" in line)
        assert "YARN gives 1 of 2 nodes; " in first


# ---------------------------------------------------------------- a real ResourceManager


NEEDS_AN_OPERATOR = (
    a_manager_that_is_away_is_an_error,
    a_drained_host_is_announced,
    a_killed_host_loses_its_placement_only,
)


@pytest.fixture
def real_yarn(tmp_path: Path) -> Iterator[YarnCluster]:
    """Start a lab, or take the ResourceManager that is named."""
    why = missing()
    if why and RM_VARIABLE not in os.environ:
        pytest.skip(f"{why}, and {RM_VARIABLE} names no ResourceManager")
    with contextlib.ExitStack() as stack:
        lab = None if why else stack.enter_context(YarnLab(tmp_path / "yarn"))
        yield stack.enter_context(YarnCluster(lab))


# Each case that an operator takes part in has a lab of its own: a ResourceManager of 3.4.2 that was
# started again does not forget a container's tag, and does not report a lost host to a master.
IN_ONE_LAB = [case for case in CLUSTER_CASES if case not in NEEDS_AN_OPERATOR]


@pytest.mark.clusters
@pytest.mark.parametrize(
    "cases",
    [IN_ONE_LAB, *([case] for case in NEEDS_AN_OPERATOR)],
    ids=["the others", *(case.__name__ for case in NEEDS_AN_OPERATOR)],
)
def test_a_real_resource_manager_keeps_the_contract(
    real_yarn: YarnCluster, cases: Sequence[Case]
) -> None:
    for case in cases:
        if case in NEEDS_AN_OPERATOR and not real_yarn.has_operator():
            pytest.skip("only a lab's hosts and manager can be ended")
        if len(real_yarn.hosts) > 1 or case is not two_placements_have_hosts_of_their_own:
            run_cluster_case(case, real_yarn)


@pytest.mark.clusters
def test_a_job_survives_a_lost_container_on_a_real_resource_manager(
    real_yarn: YarnCluster, undisturbed: str
) -> None:
    asked = ("yarn", "--rm", real_yarn.url)
    job = ClusterRun(real_yarn.folder, asked, "--nodes", "2", "--wait-for-nodes")
    with job.run:
        first = job.serving(2)
        job.lose(first[0])
        job.serving(2, without=first[:1])
        assert job.digest() == undisturbed
    shutil.rmtree(real_yarn.folder)


@pytest.mark.clusters
def test_a_job_survives_the_loss_of_its_masters_host(
    real_yarn: YarnCluster, undisturbed: str
) -> None:
    if not real_yarn.has_operator():
        pytest.skip("only a lab's hosts can be ended")
    lab = real_yarn.lab
    job = ClusterRun(real_yarn.folder, ("yarn", "--rm", real_yarn.url), "--nodes", "2")
    with job.run:
        job.serving(2)
        host = environment_of(lab.master())["NM_HOST"]
        lost = [name for name in job.serving(2) if host_of(name) == host]
        lab.kill(host)
        job.serving(2, without=lost)
        assert job.digest() == undisturbed
    shutil.rmtree(real_yarn.folder)


def host_of(name: str) -> str:
    """Return the host of a node, by the environment of its agent."""
    return environment_of(our_processes(f"HOLDFAST_PLACEMENT={name}")[0])["NM_HOST"]


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.clusters
def test_an_operator_ends_a_job_on_a_real_resource_manager(
    real_yarn: YarnCluster, undisturbed: str
) -> None:
    folder = real_yarn.folder / "a b,ü%&;(#!"  # a name that YARN does not change
    folder.mkdir()
    asked = ("yarn", "--rm", real_yarn.url)
    assert_ends_with_its_service(folder, asked, undisturbed, real_yarn.stop)
    shutil.rmtree(real_yarn.folder)
