"""An operator of a real Slurm reboots hosts of a job, holds it, and kills its steps together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.runtime.local_run import strike
from labs.cluster_run import run_undisturbed
from labs.slurm_cluster import SlurmCluster
from labs.slurm_run import SlurmRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(SlurmCluster.missing()), reason=SlurmCluster.missing()),
]
NODES = 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Start a cluster that has no spare host; a step ends whole when one of its tasks fails."""
    with SlurmCluster(tmp_path / "slurm", hosts=NODES, more=["KillOnBadExit=1"]) as made:
        yield made


@contextlib.contextmanager
def run_job(folder: Path, cluster: SlurmCluster) -> Iterator[tuple[SlurmRun, list[str]]]:
    """Run a job on all hosts, and wait until it uses them; yield it and its nodes."""
    store = ("--store", str(folder / "store"), "--save-every", "10", "--abandon-s", "8")
    job = SlurmRun(folder, cluster, "--nodes", str(NODES), "--nodes-min", "1", *store)
    with job.run:
        job.begin()
        job.until(lambda: len(job.serving()) == NODES, "all nodes")
        yield job, job.serving()


def test_a_host_of_a_job_of_fixed_size_is_rebooted(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm does so once the job has left the host and given it back; then the job takes it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with run_job(tmp_path, cluster) as (job, before):
        host = next(host for host in cluster.hosts if host != job.script_host())
        cluster.reboot(host)
        job.until(lambda: len({*job.serving()} - {*before}) == 1, "a node on the rebooted host")
        assert len(job.serving()) == NODES
        assert "a new kernel" in job.log()
        assert "was lost" not in job.log()
        assert not list(here.glob("slurm_job_*")), "scontrol's scripts are left behind"
        assert job.digest() == undisturbed
    assert not job.further_jobs()


def test_a_job_that_is_held_goes_on_once_it_is_released(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    with run_job(tmp_path, cluster) as (job, before):
        job.until(job.steps_saved, "a checkpoint")
        id_ = cluster.allocation
        cluster.slurm("scontrol", "requeuehold", id_)
        job.until(lambda: cluster.states() == ["idle"] * NODES, "the job holds no host")
        assert cluster.slurm("squeue", "--noheader", f"-j{id_}", "-o%t") == "PD"
        cluster.slurm("scontrol", "release", id_)
        job.until(lambda: len({*job.serving()} - {*before}) == NODES, "all nodes, begun again")
        assert "from the checkpoint of step" in job.log()
        assert job.digest() == undisturbed


def test_a_step_that_fails_is_replaced(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    with run_job(tmp_path, cluster) as (job, before):
        for pid in cluster.processes(PlacementId(before[-1])):
            strike(pid)
        job.until(lambda: len({*job.serving()} - {*before}) == 1, "another node")
        assert {*before[:-1]} < {*job.serving()}
        assert job.digest() == undisturbed
