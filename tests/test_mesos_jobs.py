"""Jobs on Mesos survive what happens to hosts, tasks, masters and launchers, on a fake."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import SCRIPTS, finish
from holdfast.core.errors import HoldfastError
from holdfast.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.testing.cluster_contract import assert_survives, serving_nodes
from holdfast.testing.local_run import LocalRun, strike
from labs.fake_mesos import FakeMesos
from labs.slurm_cluster import our_processes

SCRIPT, STEPS = str(SCRIPTS / "paced.py"), "600"
OPTIONS = ["--nproc", "1", "--virtual", "4"]
JOB_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    with LocalRun(folder / "run", OPTIONS, [SCRIPT, str(folder / "go"), STEPS]) as run:
        return finish(run)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeMesos]:
    with FakeMesos(tmp_path, hosts=6, masters=2) as made:
        yield made


class MesosRun:
    """Runs a job on Mesos that goes on slowly until it is let go."""

    def __init__(self, tmp_path: Path, url: str, *options: str) -> None:
        self.go, self.folder = tmp_path / "go", tmp_path / "run"
        command = ("launch", "mesos", "--master", url, "--host", "127.0.0.1", "--memory", "1024")
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


class FakeObserver:
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


class JobHarness:
    """Is the harness of the contract suite for one job on a fake."""

    def __init__(self, fake: FakeMesos) -> None:
        self.hosts, self.domains = fake.hosts, fake.domains
        self.manager = lambda job: FakeObserver(fake)
        self.kill, self.drain, self.away = fake.kill, fake.drain, fake.away
        self.processes = fake.processes


def test_a_job_survives_a_killed_and_a_drained_host(
    tmp_path: Path, fake: FakeMesos, undisturbed: str
) -> None:
    job = MesosRun(tmp_path, fake.url, "--nodes", "3")
    with job.run:
        job.serving(3)
        harness: Any = JobHarness(fake)
        assert_survives(job.run, harness, job.go.touch)
        assert job.digest() == undisturbed
    assert not fake.frameworks
    # The fleet says this once of each node; events of the job depend on who is late just then.
    assert sum(" is drained: " in line for line in job.run.err) == 1, job.run.err


def test_a_job_survives_a_lost_task_another_leading_master_and_its_fleets_death(
    tmp_path: Path, fake: FakeMesos, undisturbed: str
) -> None:
    job = MesosRun(tmp_path, fake.url, "--nodes", "3")
    with job.run:
        first = job.serving(3)
        lose(job, first[0])
        second = job.serving(3, without=first[:1])
        fake.fail_over(known_in_s=2.0)
        fleet = job.until(lambda: fleet_of(job.run), "the fleet's process")
        strike(fleet)
        lose(job, second[0])
        job.serving(3, without=[*first[:1], *second[:1]])
        assert job.digest() == undisturbed
    assert not fake.frameworks


def lose(job: MesosRun, name: str) -> None:
    """Kill all processes of a node's agent, and its task with them."""
    for pid in our_processes(f"HOLDFAST_PLACEMENT={name}"):
        strike(pid)


def fleet_of(run: LocalRun) -> int:
    for pid in run.leftovers():
        with contextlib.suppress(OSError):
            if b"holdfast.launch.fleet_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def test_a_launcher_that_is_killed_is_resumed(
    tmp_path: Path, fake: FakeMesos, undisturbed: str
) -> None:
    store = ("--store", str(tmp_path / "store"), "--save-every", "10", "--abandon-s", "8")
    job = MesosRun(tmp_path, fake.url, "--nodes", "3", *store)
    with job.run:
        before = job.serving(3)
        # The first is surely in the coordinator's journal when the second one is told.
        job.until(lambda: sum("is saved" in line for line in job.run.err) > 1, "two checkpoints")
        os.kill(job.run.pid, signal.SIGKILL)
    job.run = LocalRun(job.folder, [], [], command=("resume", str(job.folder)))
    with job.run:
        assert not set(job.serving(3, without=before)) & set(before)
        assert job.digest() == undisturbed
    assert not fake.frameworks
    begun = [event["text"] for event in job.run.events("view")]
    assert any("from the checkpoint of step" in text for text in begun), begun


def test_an_interrupted_job_gives_all_back(tmp_path: Path, fake: FakeMesos) -> None:
    job = MesosRun(tmp_path, fake.url, "--nodes", "2")
    with job.run:
        names = job.serving(2)
        job.run.signal(signal.SIGINT)
        assert job.run.wait(JOB_S) == 130
    assert not fake.frameworks
    assert not [pid for name in names for pid in fake.processes(PlacementId(name))]
