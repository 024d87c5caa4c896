"""Jobs on a real ResourceManager survive its operator's settings and the faults of its hosts.

Each test has a lab of its own, whose settings are those of the case. Whatever happened, nothing of
a job is left on the cluster at its end.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from labs.cluster_run import JOB_S, ClusterRun, environment_of, host_of, run_undisturbed
from labs.yarn_lab import YarnLab, missing

NODE, MANAGER = "yarn.nodemanager", "yarn.resourcemanager"
CHECKS_MEMORY = {
    f"{NODE}.pmem-check-enabled": "true",
    f"{NODE}.resource.memory.enforced": "false",  # else only cgroups are to enforce it
    f"{NODE}.container-monitor.interval-ms": "500",
}
CHECKS_DISKS = {
    f"{NODE}.disk-health-checker.enable": "true",
    f"{NODE}.disk-health-checker.interval-ms": "1000",
    f"{NODE}.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
}
QUEUES = "yarn.scheduler.capacity.root"
TWO_QUEUES = {
    "yarn.acl.enable": "true",
    f"{QUEUES}.queues": "default,private",
    f"{QUEUES}.default.capacity": "50",
    f"{QUEUES}.private.capacity": "50",
    f"{QUEUES}.acl_submit_applications": " ",  # what a parent allows, its queues allow too
    f"{QUEUES}.acl_administer_queue": " ",
    f"{QUEUES}.private.acl_submit_applications": "root",
    "hadoop.proxyuser.root.hosts": "*",
    "hadoop.proxyuser.root.groups": "*",
}
MAY_NOT = "YARN says: User {0} does not have permission to submit application_[0-9_]+ to queue {1};"
REFUSALS = [
    ("default", "root", MAY_NOT.format("root", "default")),
    ("private", "mallory", MAY_NOT.format("mallory", "private")),
    ("nowhere", "root", "^holdfast: --queue nowhere: YARN says: .*unknown queue: nowhere; name"),
]
MEMORY_MB = 2048
BALLAST = 1500 << 20  # a node without it has some 1200 MB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def launch(lab: YarnLab, folder: Path, *options: str) -> ClusterRun:
    """Prepare a job with two nodes."""
    folder.mkdir(exist_ok=True)
    return ClusterRun(folder, ("yarn", "--rm", lab.url), "--nodes", "2", *options)


def until_written(job: ClusterRun, sentence: str) -> str:
    """Wait until the command writes a line with a sentence; return the line."""
    found: str = job.until(
        lambda: next((line for line in job.run.err if sentence in line), ""), sentence
    )
    return found


def until_replaced(job: ClusterRun, names: list[str]) -> set[str]:
    """Wait until the job has two nodes that are not all in `names`; return the lost ones."""
    job.until(lambda: set(job.serving(2)) != set(names), f"another node than {names}")
    return set(names) - set(job.serving(2))


def test_a_container_that_yarn_kills_for_its_memory_is_named(
    tmp_path: Path, undisturbed: str
) -> None:
    with YarnLab(tmp_path / "yarn", 2, CHECKS_MEMORY) as lab:
        job = launch(lab, tmp_path / "job", "--memory", str(MEMORY_MB))
        with job.run:
            names = job.serving(2)
            Path(f"{job.go}.hungry").write_text(str(BALLAST))
            (lost,) = until_replaced(job, names)
            said = until_written(job, f"{lost} has ended on nm")
            assert " MB, more than the 2048 MB that its container asked for: if YARN" in said
            assert job.digest() == undisturbed


def test_a_host_whose_disk_fails_is_left(tmp_path: Path, undisturbed: str) -> None:
    with YarnLab(tmp_path / "yarn", 3, CHECKS_DISKS) as lab:
        job = launch(lab, tmp_path / "job")
        with job.run:
            names = job.serving(2)
            broken = next(name for name in names if host_of(name) != master_host(lab))
            host = host_of(broken)
            lab.break_disk(host)
            assert until_replaced(job, names) == {broken}
            said = until_written(
                job, f"{broken} has ended on {host}: YARN calls the host unhealthy"
            )
            assert "1/1 local-dirs" in said
            assert host not in {host_of(name) for name in job.serving(2)}
            assert job.digest() == undisturbed


def test_a_job_leaves_a_host_that_is_decommissioned(tmp_path: Path, undisturbed: str) -> None:
    with YarnLab(tmp_path / "yarn", 3) as lab:
        job = launch(lab, tmp_path / "job")
        with job.run:
            names = job.serving(2)
            lab.drain(host_of(names[0]))
            assert until_replaced(job, names) == {names[0]}
            until_written(job, "YARN decommissions its node")
            assert job.digest() == undisturbed


def test_a_job_goes_on_while_the_resource_manager_is_away(tmp_path: Path, undisturbed: str) -> None:
    with YarnLab(tmp_path / "yarn", 2) as lab:
        job = launch(lab, tmp_path / "job")
        with job.run:
            names = job.serving(2)
            lab.away(True)
            until_written(job, "YARN does not answer at")
            step = job.run.status()["step"]
            job.until(lambda: job.run.status()["step"] > step + 5, "steps without a manager")
            lab.away(False)
            assert job.serving(2) == names
            assert job.digest() == undisturbed
        assert_nothing_is_left(lab)


def test_a_user_who_may_not_submit_reads_it(tmp_path: Path, undisturbed: str) -> None:
    with YarnLab(tmp_path / "yarn", 2, TWO_QUEUES) as lab:
        for queue, user, sentence in REFUSALS:
            options = ("--queue", queue, "--user", user)
            refused = launch(lab, tmp_path / f"{queue}-{user}", *options)
            with refused.run as run:
                assert run.wait(JOB_S) == 2
            assert re.search(sentence, run.err[-1]), run.err
            assert len(run.err) == 2  # the first names the run directory
        assert_nothing_is_left(lab)
        job = launch(lab, tmp_path / "job", "--queue", "private")
        with job.run:
            job.serving(2)
            assert job.digest() == undisturbed


def test_nothing_is_left_after_a_job(tmp_path: Path, undisturbed: str) -> None:
    with YarnLab(tmp_path / "yarn", 2) as lab:
        for name, ending in (("done", 0), ("interrupted", 130)):
            job = launch(lab, tmp_path / name)
            with job.run:
                job.serving(2)
                (service,) = lab.registry()
                assert service.startswith("hf-")
                assert lab.service_files()
                assert lab.applications()
                assert lab.container_files()
                assert lab.containers()
                if ending:
                    job.run.signal(signal.SIGINT)
                    assert job.run.wait(JOB_S) == ending
                else:
                    assert job.digest() == undisturbed
            assert_nothing_is_left(lab)


def master_host(lab: YarnLab) -> str:
    return environment_of(lab.master())["NM_HOST"]


def assert_nothing_is_left(lab: YarnLab) -> None:
    """Assert that a job has left nothing in YARN; the hosts remove their files by themselves."""
    assert lab.applications() == []
    assert lab.registry() == []
    assert lab.service_files() == []
    lab.until(lambda: not lab.container_files(), "the hosts have removed the containers' files")
    lab.until(lambda: not lab.containers(), "the containers' processes have ended")
