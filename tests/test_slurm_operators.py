"""An operator of a real Slurm reboots hosts of a job, holds it, and kills its steps together."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.fleet.placements import PlacementId
from holdfast.testing.local_run import strike
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
OURS = os.readlink("/proc/self/ns/mnt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


# Each job has a /tmp of its own on each host, and a step ends whole when one of its tasks fails.
PRIVATE = ("JobContainerType=job_container/tmpfs", "PrologFlags=Contain", "KillOnBadExit=1")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder that jobs with a /tmp of their own see as well."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def private(shared: Path) -> Iterator[SlurmCluster]:
    """Start a cluster of one host: the plugin is not made for several slurmds on one machine."""
    folder = shared / "slurm"
    folder.mkdir()
    (folder / "job_container.conf").write_text(f"AutoBasePath=true\nBasePath={folder}/private\n")
    with SlurmCluster(folder, hosts=1, more=PRIVATE) as made:
        yield made
    mounts = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    for mount in sorted((each for each in mounts if each.startswith(str(folder))), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Start a cluster that has no spare host."""
    with SlurmCluster(tmp_path / "slurm", hosts=NODES) as made:
        yield made


def submit(folder: Path, cluster: SlurmCluster) -> SlurmRun:
    store = ("--store", str(folder / "store"), "--save-every", "10", "--abandon-s", "8")
    nodes = ("--nodes", str(len(cluster.hosts)), "--nodes-min", "1")
    return SlurmRun(folder, cluster, *nodes, *store)


def test_a_host_of_a_job_of_fixed_size_is_rebooted(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    """Slurm does so once the job has left the host and given it back; then the job takes it."""
    job = submit(tmp_path, cluster)
    with job.run:
        job.begin()
        job.until(lambda: len(job.serving()) == NODES, "all nodes")
        before = {*job.serving()}
        host = next(host for host in cluster.hosts if host != job.script_host())
        cluster.reboot(host)
        job.until(lambda: len({*job.serving()} - before) == 1, "a node on the rebooted host")
        assert len(job.serving()) == NODES
        assert "a new kernel" in job.log()
        assert "was lost" not in job.log()
        assert job.digest() == undisturbed
    assert not job.further_jobs()


def test_a_job_that_is_held_goes_on_once_it_is_released(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    job = submit(tmp_path, cluster)
    with job.run:
        id_ = job.begin()
        job.until(lambda: len(job.serving()) == NODES, "all nodes")
        job.until(job.steps_saved, "a checkpoint")
        before = {*job.serving()}
        cluster.slurm("scontrol", "requeuehold", id_)
        job.until(lambda: cluster.states() == ["idle"] * NODES, "the job holds no host")
        assert cluster.slurm("squeue", "--noheader", f"-j{id_}", "-o%t") == "PD"
        cluster.slurm("scontrol", "release", id_)
        job.until(lambda: len({*job.serving()} - before) == NODES, "all nodes, begun again")
        assert "from the checkpoint of step" in job.log()
        assert job.digest() == undisturbed


def test_a_step_that_fails_is_replaced_where_jobs_have_a_tmp_of_their_own(
    shared: Path, private: SlurmCluster, undisturbed: str
) -> None:
    job = submit(shared, private)
    with job.run:
        job.begin()
        (before,) = job.until(job.serving, "a node")
        job.until(job.steps_saved, "a checkpoint")
        processes = private.processes(PlacementId(before))
        assert all(os.readlink(f"/proc/{pid}/ns/mnt") != OURS for pid in processes[:1])
        for pid in processes:
            strike(pid)
        job.until(lambda: {*job.serving()} - {before}, "another node")
        assert job.digest() == undisturbed
