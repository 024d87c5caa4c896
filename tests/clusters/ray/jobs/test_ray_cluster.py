"""A real Ray cluster on this machine: its adapter keeps the contract, and jobs survive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import finish
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    assert_survives,
    run_cluster_case,
    serving_nodes,
)
from labs.cluster_run import OPTIONS, SCRIPT, STEPS, run_undisturbed
from labs.ray_cluster import RayCluster
from ray_kit import check_reasons

JOB_S = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(RayCluster.missing()), reason=RayCluster.missing()),
]


@pytest.fixture(scope="module")
def contract_cluster() -> Iterator[RayCluster]:
    with RayCluster(hosts=4) as made:
        yield made


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_ray_keeps_the_contract(case: Case, contract_cluster: RayCluster) -> None:
    run_cluster_case(case, contract_cluster)


def test_why_ray_does_not_start_an_actor_is_found() -> None:
    """The head has no CPUs."""
    with RayCluster(hosts=2) as cluster:
        asyncio.run(check_reasons(cluster, small=1))


# ---------------------------------------------------------------- jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(hosts=5) as made:
        yield made


class RayRun:
    """A job on Ray that runs slowly until the test lets it go."""

    def __init__(self, tmp_path: Path, cluster: RayCluster, *options: str) -> None:
        self.go, self.cluster = tmp_path / "go", cluster
        command = (
            "launch",
            "ray",
            "--address",
            cluster.address,
            "--host",
            "127.0.0.1",
            "--domain-label",
            "rack",
        )
        command += ("--run-dir", str(tmp_path / "run"), "--cpus", "0.5", *options)
        script = [SCRIPT, str(self.go), STEPS]
        self.run = LocalRun(tmp_path / "run", OPTIONS, script, command=command)

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        try:
            return self.run.until(ready, JOB_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.written()}") from None

    def hosts(self) -> dict[str, str]:
        """Return the hosts of the agents that train; none while somebody does not answer."""
        with contextlib.suppress(HoldfastError):
            found = serving_nodes(self.run.status())
            tables = self.cluster.tables().placements("hf-", 0.0, 0.0)
            hosts = {str(each.id): each.host for each in tables}
            return {name: hosts[name] for name in found if hosts.get(name)}
        return {}

    def three(self, without: str = "") -> dict[str, str]:
        def complete() -> dict[str, str]:
            found = self.hosts()
            return found if len(found) == 3 and without not in found else {}

        what = f"another node in place of {without}" if without else "three nodes"
        found: dict[str, str] = self.until(complete, what)
        return found

    def saved(self) -> bool:
        """Return whether the coordinator knows of a checkpoint."""
        return any("is saved" in line for line in self.run.err)

    def written(self) -> str:
        """Return what agents and workers have printed."""
        return "\n".join(p.read_text() for p in self.run.run_dir.path.glob("logs/hf-*.txt"))

    def digest(self) -> str:
        """Let the job go on to its end, and return its last line; no process is left."""
        self.go.touch()
        finish(self.run)
        (found,) = re.findall("^[0-9a-f]{64}$", self.written(), re.MULTILINE)
        assert not self.cluster.tables().actors
        return str(found)


def test_a_job_survives_a_killed_and_a_drained_host(
    tmp_path: Path, cluster: RayCluster, undisturbed: str
) -> None:
    job = RayRun(tmp_path, cluster, "--nodes", "3")
    with job.run:
        job.three()
        assert_survives(job.run, cluster, job.go.touch)
        assert job.digest() == undisturbed


def test_a_job_survives_lost_raylets_and_actors_deadlines_and_its_fleets_death(
    tmp_path: Path, cluster: RayCluster, undisturbed: str
) -> None:
    job = RayRun(tmp_path, cluster, "--nodes", "3")
    with job.run:
        lost, host = next(iter(job.three().items()))
        os.kill(cluster.raylet(host), signal.SIGKILL)
        taken, _ = next(iter(job.three(without=lost).items()))
        cluster.kill_actor(taken)
        before = job.three(without=taken)
        strike(job.until(lambda: fleet_of(job.run), "the fleet's process"))
        drained, host = next(iter(before.items()))
        cluster.drain(host, "a new fan", within_s=30)
        assert host not in job.three(without=drained).values()
        assert job.digest() == undisturbed
    # The fleet says this once of each node; events of the job depend on who is late just then.
    assert sum(" is drained: " in line for line in job.run.err) == 1, job.run.err


def test_an_interrupted_job_is_resumed(
    tmp_path: Path, cluster: RayCluster, undisturbed: str
) -> None:
    store = ("--store", str(tmp_path / "store"), "--save-every", "10", "--abandon-s", "8")
    job = RayRun(tmp_path, cluster, "--nodes", "3", *store)
    with job.run:
        before = job.three()
        job.until(job.saved, "a checkpoint")
        os.kill(job.run.pid, signal.SIGKILL)
    again = LocalRun(tmp_path / "run", [], [], command=("resume", str(tmp_path / "run")))
    job.run = again
    with again:
        assert not set(job.three()) & set(before)
        assert job.digest() == undisturbed
    begun = [event["text"] for event in again.events("view")]
    assert any("from the checkpoint of step" in text for text in begun), begun


def fleet_of(run: LocalRun) -> int:
    for pid in run.leftovers():
        with contextlib.suppress(OSError):
            if b"holdfast.engine.fleet.fleet_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0
