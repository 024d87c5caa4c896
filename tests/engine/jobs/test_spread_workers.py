"""Workers whose processes are spread over several nodes: any process, and any node, may be lost."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_memory_tier import end, recalls, refused, until_step

from conftest import RUN_S, SCRIPTS, computed_twice, finish
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.data.sampling import plan_of
from labs.local_nodes import LocalNodes, names
from places import ROOT

EXAMPLE = ROOT / "examples" / "fsdp.py"
STEPS = 16
HELD = 6  # the step after which a job waits until the test has struck
Quiet = Callable[[int], str]


@contextlib.contextmanager
def spread(
    path: Path,
    *options: str,
    nodes: int = 2,
    procs: int = 2,
    more: int = 0,
    workers: int = 1,
    faults: str = "-",
    steps: int = STEPS,
) -> Iterator[tuple[LocalRun, LocalNodes]]:
    """Run a job whose workers are spread over `nodes` nodes each; `more` nodes wait as spares.

    `faults`: see scripts/sharded.py.
    """
    flags = ["--nproc", "1", "--procs-per-worker", str(procs), "--nodes-per-worker", str(nodes)]
    flags += ["--nodes-min", str(nodes * workers), "--virtual", "4", "--protect-every", "3"]
    words = [str(SCRIPTS / "sharded.py"), faults, "-", str(EXAMPLE), "--steps", str(steps)]
    with LocalRun(path / "run", [*flags, *options], words) as run, LocalNodes(run) as others:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        for name in names(nodes * workers):
            others.add(name)
        run.until_members(workers)
        for number in range(more):
            others.add(f"more{number}")
        yield run, others


def go(path: Path) -> None:
    """Continue a held job."""
    (path / "go").touch()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """Return quiet(procs): the last line of one worker of `procs` processes on one node."""
    known: dict[int, str] = {}

    def last(procs: int) -> str:
        if procs not in known:
            flags = ["--nproc", "1", "--procs-per-worker", str(procs), "--virtual", "4"]
            path = tmp_path_factory.mktemp("quiet") / "run"
            with LocalRun(path, flags, [str(EXAMPLE), "--steps", str(STEPS)]) as run:
                known[procs] = finish(run)
            assert re.fullmatch("[0-9a-f]{64}", known[procs])
        return known[procs]

    return last


def lost(run: LocalRun) -> list[str]:
    return [event["text"] for event in run.events("lost")]


@pytest.mark.parametrize(
    ("nodes", "procs", "redundancy", "faults"),
    [
        pytest.param(
            2, 2, "replicate:2", "backward:0.1:5", marks=pytest.mark.slow
        ),  # on the further node
        # The process of shard 0, which decides.
        pytest.param(3, 3, "rs:2+1", "end:0.0:7", marks=pytest.mark.slow),
        pytest.param(2, 4, "replicate:2", "task:0.3:4", marks=pytest.mark.slow),
        pytest.param(3, 3, "rs:2+1", "task:0.2:5,task:0.1:5", marks=pytest.mark.slow),
        pytest.param(3, 3, "replicate:1", "backward:0.0:6", marks=pytest.mark.slow),
        pytest.param(2, 2, "replicate:2", "task:0.1:6:SIGSTOP", marks=pytest.mark.slow),
        pytest.param(2, 4, "replicate:2", "task:0.3:6:SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_any_process_of_the_only_worker_may_be_lost(
    nodes: int, procs: int, redundancy: str, faults: str, tmp_path: Path, quiet: Quiet
) -> None:
    """The shards of the other processes are still on their nodes, so no step is computed again."""
    with spread(tmp_path, "--redundancy", redundancy, nodes=nodes, procs=procs, faults=faults) as (
        run,
        others,
    ):
        assert quiet(procs) in end(run, others)
    assert len(recalls(run)) == 1
    assert computed_twice(run) == []
    assert len(lost(run)) == 1, lost(run)
    report = verify(run.run_dir.path, plan_of)
    assert report.ok, report.findings


@pytest.mark.slow
@pytest.mark.parametrize("late", ["0.0", "0.1", "0.2", "0.3"])
def test_a_process_that_is_late_before_it_joins_is_waited_for(
    late: str, tmp_path: Path, quiet: Quiet
) -> None:
    """No other process runs in this time, and none of them counts as frozen."""
    with spread(tmp_path, procs=4, faults=f"late:{late}:5") as (run, others):
        assert quiet(4) in end(run, others)
    assert lost(run) == []


@pytest.mark.slow
def test_a_node_is_lost_and_one_that_waits_takes_its_place(tmp_path: Path, quiet: Quiet) -> None:
    with spread(
        tmp_path, "--redundancy", "rs:2+1", nodes=3, procs=3, more=1, faults=f"held:0.0:{HELD}"
    ) as (run, others):
        until_step(run, HELD)
        others.kill("node2")
        run.until(lambda: len(recalls(run)) == 1, RUN_S, "a recall")
        go(tmp_path)
        assert quiet(3) in end(run, others)
    assert computed_twice(run) == []
    assert "node more0 takes the place of node node2" in told(run)


def told(run: LocalRun) -> list[str]:
    return [event["text"] for event in run.events("node")]


@pytest.mark.slow
def test_the_first_node_is_lost_and_comes_back_empty(tmp_path: Path, quiet: Quiet) -> None:
    with spread(tmp_path, "--redundancy", "replicate:2", faults=f"held:0.0:{HELD}") as (
        run,
        others,
    ):
        until_step(run, HELD)
        strike(next(each["pid"] for each in run.status()["agents"] if each["id"] == "node0"))
        run.until(lambda: len(recalls(run)) == 1, RUN_S, "a recall")
        assert quiet(2) in end(run, others)
    assert computed_twice(run) == []


@pytest.mark.slow
def test_a_lost_node_is_waited_for_until_another_one_joins(tmp_path: Path, quiet: Quiet) -> None:
    with spread(tmp_path, "--redundancy", "replicate:2", faults=f"held:0.0:{HELD}") as (
        run,
        others,
    ):
        until_step(run, HELD)
        others.kill("node1")
        run.until(lambda: lost(run), RUN_S, "the loss")
        others.add("later")
        run.until(lambda: len(recalls(run)) == 1, RUN_S, "a recall")
        assert quiet(2) in end(run, others)
    assert computed_twice(run) == []


@pytest.mark.slow
def test_beyond_what_is_protected_the_job_goes_back_to_a_checkpoint(
    tmp_path: Path, quiet: Quiet
) -> None:
    options = ("--redundancy", "replicate:1", "--store", str(tmp_path / "store"))
    options += ("--save-every", "2", "--abandon-s", "6")
    with spread(tmp_path, *options, more=1, faults=f"held:0.0:{HELD}") as (run, others):
        until_step(run, HELD)
        others.kill("node1")
        run.until(lambda: "from the checkpoint" in run.events("view")[-1]["text"], RUN_S, "a view")
        assert quiet(2) in end(run, others)
    assert recalls(run) == []


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("task:0.1:5", marks=pytest.mark.slow),
        pytest.param("backward:1.0:6", marks=pytest.mark.slow),
        pytest.param("task:1.1:5:SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_one_of_two_workers_is_lost_and_the_other_one_goes_on(
    fault: str, tmp_path: Path, quiet: Quiet
) -> None:
    with spread(tmp_path, workers=2, faults=fault) as (run, others):
        assert quiet(2) in end(run, others)
    assert recalls(run) == []
    assert len(lost(run)) == 1, lost(run)


@pytest.mark.slow
def test_a_node_of_one_of_two_workers_is_lost(tmp_path: Path, quiet: Quiet) -> None:
    hold = f"held:0.0:{HELD},held:1.0:{HELD}"
    with spread(tmp_path, workers=2, more=1, faults=hold) as (run, others):
        until_step(run, HELD)
        others.kill("node3")
        run.until(lambda: len(run.events("view")) > 1, RUN_S, "a view")
        go(tmp_path)
        assert quiet(2) in end(run, others)


@pytest.mark.slow
def test_a_drained_node_is_left_by_the_only_worker(tmp_path: Path, quiet: Quiet) -> None:
    """Another node takes its place. The memory bears no loss, so the old one stays to be read."""
    with spread(tmp_path, "--redundancy", "replicate:1", more=1, faults=f"held:0.0:{HELD}") as (
        run,
        others,
    ):
        until_step(run, HELD)
        run.until(lambda: len(run.status()["agents"]) == 3, RUN_S, "a node that waits")
        with ThreadPoolExecutor() as pool:
            order = pool.submit(command, "drain", "node1", "--run", str(run.run_dir.path))
            run.until(lambda: len(recalls(run)) == 1, RUN_S, "a recall")
            go(tmp_path)
            done = order.result(RUN_S)
        assert done.returncode == 0, done.stderr
        assert "if it is gone before, the job goes back to step 0" in done.stderr
        assert quiet(2) in end(run, others)
    assert len(recalls(run)) == 1
    assert computed_twice(run) == []
    assert lost(run) == []


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "holdfast.cli.main", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=RUN_S)


@pytest.mark.slow
def test_a_coordinator_that_is_away_makes_nobody_pause(tmp_path: Path) -> None:
    """Votes prove the right to act to all nodes of both workers."""
    options = ("--lease-s", "3")  # a step may take a second on a busy machine
    with spread(tmp_path, *options, workers=2, steps=4000) as (run, _):
        until_step(run, HELD)
        pid = int(run.status()["coordinator"]["pid"])
        strike(pid, signal.SIGSTOP)
        ledger = run.run_dir.path / "ledger"
        before = sum(path.stat().st_size for path in ledger.iterdir())
        began = time.monotonic()

        def goes_on() -> bool:
            now = sum(path.stat().st_size for path in ledger.iterdir())
            return time.monotonic() - began > 12.0 and now > 2 * before

        run.until(goes_on, RUN_S, "steps without a coordinator")
        logs = [path.read_text() for path in run.run_dir.logs.glob("worker-*.log")]
        assert len(logs) == 4
        assert not any("paused" in log for log in logs), logs
        strike(pid, signal.SIGCONT)
    assert lost(run) == []


@pytest.mark.slow
def test_a_spread_worker_is_not_moved_by_itself(tmp_path: Path) -> None:
    with spread(tmp_path, faults=f"held:0.0:{HELD}") as (run, _):
        until_step(run, HELD)
        done = command("migrate", "0", "--to", "node1", "--run-dir", str(run.run_dir.path))
        assert done.returncode != 0
        assert "is not moved by itself: drain one of its nodes" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_script_that_fails_on_a_further_node_is_told_as_such(tmp_path: Path) -> None:
    with spread(tmp_path, faults="fails:0.1:5") as (run, _):
        assert run.wait(RUN_S) == 1
    assert "ValueError: it fails" in run.log()
    assert "process 1 of the worker" in run.log()
    assert lost(run) == []


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--nodes-min", "2", "--procs-per-worker", "3"),
            ["--procs-per-worker 3", "no multiple of --nodes-per-worker 2"],
        ),
        pytest.param(
            ("--nodes-min", "3", "--procs-per-worker", "2"),
            ["--nodes-min 3", "no multiple of --nodes-per-worker 2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--nodes-min", "2", "--procs-per-worker", "2", "--spares", "1"),
            ["--nodes-per-worker 2", "--spares 1", "exclude each other"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(options: tuple[str, ...], words: list[str]) -> None:
    said = refused("--nodes-per-worker", "2", *options)
    assert all(word in said for word in words), said
