"""A real Slurm on this machine: its adapter keeps the contract, and jobs survive its faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from full_disk import fill, mount_small_disk
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    assert_survives,
    run_cluster_case,
)
from labs.cluster_run import run_undisturbed
from labs.slurm_cluster import SlurmCluster
from labs.slurm_run import SlurmRun
from support import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.skipif(bool(SlurmCluster.missing()), reason=SlurmCluster.missing()),
]


@pytest.fixture(scope="module", params=["further jobs", "an allocation"])
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), hosts=7) as made:
        if request.param == "an allocation":
            made.allocate(3)
        yield made


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_slurm_keeps_the_contract(case: Case, slurm: SlurmCluster) -> None:
    run_cluster_case(case, slurm)


# ---------------------------------------------------------------- jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), hosts=9) as made:
        yield made


@pytest.mark.timeout(400)
def test_a_job_survives_a_killed_and_a_drained_host(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    job = SlurmRun(tmp_path, cluster, "--nodes", "3")
    with job.run:
        job.begin()
        job.until(job.serving, "the first step")
        assert_survives(job.run, cluster, job.go.touch, keep=job.script_host())
        assert job.digest() == undisturbed
    assert not job.further_jobs()


@pytest.mark.timeout(400)
def test_a_further_job_is_replaced_and_a_requeued_job_goes_on(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    store = ("--store", str(tmp_path / "store"), "--save-every", "10", "--abandon-s", "8")
    job = SlurmRun(tmp_path, cluster, "--nodes", "1", "--nodes-max", "2", *store)
    with job.run:
        id_ = job.begin()
        job.until(lambda: len(job.serving()) == 2, "a further job")
        ((name, further),) = job.further_jobs().items()
        cluster.slurm("scancel", further)

        def another() -> bool:
            found = job.serving()
            return len(found) == 2 and name not in found

        job.until(another, "another job in place of the cancelled one")
        job.until(job.steps_saved, "a checkpoint")
        before = job.serving()
        cluster.slurm("scontrol", "requeue", id_)

        def has_new_nodes() -> bool:
            found = job.serving()
            return len(found) == 2 and not set(found) & set(before)

        job.until(has_new_nodes, "new nodes of the requeued job")
        assert "from the checkpoint of step" in job.log()
        assert job.digest() == undisturbed
    assert not job.further_jobs()


@pytest.mark.timeout(400)
def test_a_job_whose_script_has_lost_its_host_is_requeued_by_a_node(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SLURM_LOOK_S", "2")
    store = ("--store", str(tmp_path / "store"), "--save-every", "10", "--abandon-s", "8")
    job = SlurmRun(tmp_path, cluster, "--nodes", "2", *store)
    with job.run:
        job.begin()
        job.until(lambda: len(job.serving()) == 2, "two nodes")
        job.until(job.steps_saved, "a checkpoint")
        before, host = job.serving(), job.script_host()
        cluster.kill(host)

        def has_new_nodes() -> bool:
            found = job.serving()
            return len(found) == 2 and not set(found) & set(before)

        job.until(has_new_nodes, "new nodes of the requeued job")
        assert job.script_host() != host
        assert job.digest() == undisturbed


@pytest.mark.timeout(400)
def test_the_environment_and_the_options_of_a_user_change_nothing(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    exclude = f"--sbatch=--exclude={cluster.hosts[0]}"
    options = ("--nodes", "2", "--sbatch=--export=NONE", exclude)
    job = SlurmRun(tmp_path, cluster, *options)
    job.environment = ["SQUEUE_PARTITION=other", "SLURM_TIME_FORMAT=relative", "SINFO_STATES=down"]
    with job.run:
        job.begin()
        job.until(lambda: len(job.serving()) == 2, "two nodes")
        before, spared = job.serving(), job.script_host()
        hosts = cluster.slurm("squeue", "--noheader", f"--jobs={job.slurm.allocation}", "-o%N")
        every = cluster.slurm("scontrol", "show", "hostnames", hosts).split()
        assert cluster.hosts[0] not in every
        (other,) = set(every) - {spared}
        cluster.kill(other)
        job.until(lambda: len({*job.serving()} - {*before}) == 1, "another node")
        (further,) = job.further_jobs().values()
        excluded = cluster.slurm("squeue", "--noheader", f"--jobs={further}", "-o%x")
        assert cluster.hosts[0] in cluster.slurm("scontrol", "show", "hostnames", excluded).split()
        assert job.digest() == undisturbed


@pytest.mark.timeout(400)
def test_a_job_that_is_submitted_twice_or_cancelled_is_not_disturbed_by_itself(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    """The second submission leaves the first one's further job; a cancelled job stays so."""
    store = ("--store", str(tmp_path / "store"), "--save-every", "10", "--sbatch=--time=2")
    job = SlurmRun(tmp_path, cluster, "--nodes", "1", "--nodes-max", "2", "--drain-s", "20", *store)
    with job.run:
        id_ = job.begin()
        job.until(lambda: len(job.serving()) == 2, "a further job")
        before = job.serving()
        again = cluster.slurm("sbatch", "--parsable", str(job.run_dir / "slurm_job.sh"))

        def is_refused() -> bool:
            return any("is running already" in path.read_text() for path in job.outputs())

        job.until(is_refused, "the word that the job runs")
        job.until(
            lambda: not cluster.slurm("squeue", "--noheader", f"-j{again}", "-tR,CG"), "its end"
        )
        assert job.serving() == before
        job.until(job.steps_saved, "a checkpoint")
        job.until(lambda: "time limit of Slurm job" in job.log(), "the word of the time limit")
        cluster.slurm("scancel", id_)
        # The further job may end after the submission, which waits for its own job only.
        until(lambda: not cluster.slurm("squeue", "--noheader", "--me"), "the end of all jobs")
    assert "CANCELLED" in cluster.slurm("scontrol", "show", "job", id_)


@pytest.mark.timeout(400)
def test_a_job_that_slurm_preempts_saves_and_is_begun_again_when_there_is_room(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    """All its nodes are told to leave, with a time that nobody knows."""
    free = cluster.states().count("idle")
    store = ("--store", str(tmp_path / "store"), "--save-every", "100000", "--abandon-s", "8")
    low = ("--sbatch=--partition=low", "--nodes=2")
    job = SlurmRun(tmp_path, cluster, *low, *store)
    with job.run:
        id_ = job.begin()
        job.until(lambda: len(job.serving()) == 2, "two nodes")
        other = cluster.slurm(
            "sbatch", "--parsable", f"--nodes={free}", "--output=/dev/null", "--wrap=sleep 300"
        )
        job.until(lambda: "Slurm preempts job" in job.log(), "the word of the preemption")
        job.until(job.steps_saved, "a last checkpoint")

        def is_other_running() -> bool:
            return cluster.slurm("squeue", "--noheader", f"-j{other}", "-o%t") == "R"

        job.until(is_other_running, "room for the other job")
        assert not job.further_jobs()
        assert cluster.slurm("squeue", "--noheader", f"-j{id_}", "-o%t") == "PD"
        cluster.slurm("scancel", other)
        job.until(job.serving, "the nodes of the requeued job")
        assert "from the checkpoint of step" in job.log()
        assert job.digest() == undisturbed


@pytest.mark.timeout(400)
def test_a_shared_run_directory_may_be_full_for_a_while(
    tmp_path: Path, cluster: SlurmCluster, undisturbed: str
) -> None:
    saved = Checkpoints(open_storage(str(tmp_path / "store")))
    store = ("--store", str(tmp_path / "store"), "--save-every", "100000")
    with mount_small_disk(tmp_path / "disk") as disk:
        job = SlurmRun(disk, cluster, "--nodes", "2", *store)
        with job.run:
            job.begin()
            job.until(lambda: len(job.serving()) == 2, "two nodes")
            filler = fill(disk)

            def do_all_wait() -> bool:
                return all("waits for room" in w["detail"] for w in job.run.status()["workers"])

            job.until(do_all_wait, "the wait")
            job.until(saved.steps, "a checkpoint")
            filler.unlink()
            assert job.digest() == undisturbed
            assert "was lost" not in job.log()
