"""Jobs whose nodes a fleet keeps: processes of this machine, lost and replaced while they train."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from holdfast.cli.main import main
from holdfast.clusters.local.fake_cluster import FakeCluster, kill_tree
from holdfast.engine.commands.launch_command import agent_options, launch_parser
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.job_spec import JobSpec, Nodes, Workers
from holdfast.engine.fleet.cluster_manager import FleetPlan
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.lab.contracts.cluster_contract import assert_survives, serving_nodes

SCRIPT = str(SCRIPTS / "paced.py")
OPTIONS = ("--nproc", "1", "--virtual", "4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    with LocalRun(folder / "run", [*OPTIONS], [SCRIPT, str(folder / "go")]) as run:
        return finish(run)


def launched(tmp_path: Path, *options: str) -> LocalRun:
    """A job that continues slowly until `tmp_path/go` is there."""
    run_dir = tmp_path / "run"
    command = ("launch", "local", "--run-dir", str(run_dir), "--nodes", "3")
    return LocalRun(run_dir, [*OPTIONS, *options], [SCRIPT, str(tmp_path / "go")], command=command)


def serving(run: LocalRun) -> list[str]:
    with contextlib.suppress(HoldfastError):
        return serving_nodes(run.status())
    return []


@pytest.mark.slow
def test_a_killed_node_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    with launched(tmp_path) as run:
        first = run.until(lambda: s if len(s := serving(run)) == 3 else [], RUN_S, "three nodes")
        placements = FakeCluster(run.run_dir.path / "placements")
        (pid,) = placements.processes(first[0])
        kill_tree(pid)

        def replaced() -> bool:
            found = serving(run)
            return len(found) == 3 and first[0] not in found

        run.until(replaced, RUN_S, "another node in its place")
        (tmp_path / "go").touch()
        assert finish(run) == undisturbed
    assert any(f"node {first[0]}" in line and "its agent is lost" in line for line in run.err)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    made = FakeCluster(tmp_path / "cluster", hosts=6)
    yield made
    made.close()


def on_the_fake(tmp_path: Path, cluster: FakeCluster) -> LocalRun:
    """Make a job of three nodes that the fake manager gives; the test chooses its misfortunes."""
    spec = JobSpec(
        job=os.urandom(8).hex(),
        script=SCRIPT,
        args=(str(tmp_path / "go"),),
        cwd=str(tmp_path),
        workers=Workers(nproc=1, virtual=4),
        nodes=Nodes(min=3, max=4, lease_s=2.0),
    )
    run = LocalRun(tmp_path / "run", [], [], command=("resume", str(tmp_path / "run")))
    run.run_dir.create(spec, os.urandom(32))
    FleetPlan(
        manager="fake",
        run_dir=str(run.run_dir.path),
        nodes=3,
        nodes_max=4,
        settings={"folder": str(cluster.folder), "hosts": str(len(cluster.hosts))},
    ).write()
    return run


@pytest.mark.slow
def test_a_job_survives_a_killed_and_a_drained_host(
    tmp_path: Path, cluster: FakeCluster, undisturbed: str
) -> None:
    cluster.tell(deaf=2)
    with on_the_fake(tmp_path, cluster) as run:
        assert_survives(run, cluster, (tmp_path / "go").touch)
        assert finish(run) == undisturbed
    # The fleet prints this once for each node; events of the job depend on the workers that are
    # late just then.
    assert sum(" is drained: " in line for line in run.err) == 1, run.err


@pytest.mark.slow
def test_the_fleet_and_the_manager_may_be_away_meanwhile(
    tmp_path: Path, cluster: FakeCluster, undisturbed: str
) -> None:
    with on_the_fake(tmp_path, cluster) as run:
        first = run.until(lambda: s if len(s := serving(run)) == 3 else [], RUN_S, "three nodes")
        cluster.away(True)
        fleet = run.until(lambda: fleet_of(run), RUN_S, "the fleet's process")
        strike(fleet)
        kill_tree(cluster.processes(first[0])[0])
        run.until(lambda: first[0] not in serving(run), RUN_S, "the loss")
        cluster.away(False)
        run.until(lambda: len(serving(run)) == 3, RUN_S, "another node")
        (tmp_path / "go").touch()
        assert finish(run) == undisturbed


def fleet_of(run: LocalRun) -> int:
    for pid in run.leftovers():
        with contextlib.suppress(OSError):
            if b"holdfast.engine.fleet.fleet_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def test_a_finished_job_is_not_resumed_and_a_wrong_number_of_nodes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, problem in (
        (["--nodes", "0"], "--nodes 0: at least 1 node is needed"),
        (["--nodes", "3", "--nodes-max", "2"], "--nodes-max 2 must be at least --nodes-min 3"),
        (["--write-config", "-"], "--write-config is an option of `holdfast run`"),
        (["--restarts-max", "7"], "--restarts-max 7 has an effect only with --compat"),
    ):
        run_dir = ["--run-dir", str(tmp_path / "run")]
        assert main(["launch", "local", *run_dir, *options, SCRIPT, "go"]) == 2
        assert problem in capsys.readouterr().err
    assert main(["launch", "slrum", SCRIPT]) == 2
    assert "there is no launcher 'slrum'" in capsys.readouterr().err


def test_agents_are_told_where_notices_and_checks_come_from() -> None:
    words = ["--notices", "aws", "--check", "fans=true", "--check-limit-s", "9"]
    assert agent_options(launch_parser("local", "").parse_args([*words, SCRIPT])) == tuple(words)
    assert agent_options(launch_parser("local", "").parse_args([SCRIPT])) == ()


@pytest.mark.parametrize(
    ("manager", "shown"),
    [
        ("slurm", ["the node where the coordinator runs)", "(default: 60)", "a free port)"]),
        ("ray", ["reaches this machine)", "(default: 60)", "a free port)"]),
        ("yarn", ["reaches this machine)", "(default: 60)"]),
        ("mesos", ["reaches this machine)", "(default: 60)"]),
        ("k8s", ["the name of the job's service)", "(default: 900)", "(default: 29600)"]),
        ("local", ["(default: 127.0.0.1, this machine only)", "(default: 300)"]),
    ],
)
def test_help_shows_the_defaults_of_the_launcher_and_no_option_that_it_refuses(
    manager: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", manager, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(each in text for each in shown)
    refused = {"--write-config", "--domain "} | (
        {"--tls ", "--faults"} if manager == "k8s" else set()
    )
    assert not any(each in text for each in refused)
