"""Jobs on YARN and Mesos survive what happens to hosts, nodes, masters and launchers, on fakes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from conftest import finish
from holdfast.clusters.yarn.yarn_manager import open_manager
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.engine.fleet.cluster_manager import read_plan
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.lab.contracts.cluster_contract import assert_survives
from labs.cluster_run import JOB_S, ClusterRun, assert_ends_with_its_service, run_undisturbed
from labs.fake_mesos import FakeMesos
from labs.fake_yarn import FakeYarn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


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
    # The fleet prints this once for each node; a worker that is late may hide the event of the job.
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
        # The first is surely in the coordinator's journal when the second one is printed.
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
