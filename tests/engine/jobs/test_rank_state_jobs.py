"""Jobs of real processes whose virtual ranks keep states: no fault changes a bit of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, Start, computed_twice, finish
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.leadership.journal import read_record
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.data.sampling import plan_of
from labs.local_nodes import LocalNodes, names
from support import until

SCRIPT = "carried.py"
STEPS, STRUCK = 16, 5  # the step in which workers are struck
EVERYTHING = (*("--steps", str(STEPS)), *("--hold", str(STRUCK)))
# Late or slow, a worker would host no task of the step in which it is to be struck.
HOSTS = ("--no-rebalance", "--speculation-budget", "0")


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return carried(*options): the digest of the undisturbed run on one worker with V=4."""
    known: dict[tuple[str, ...], str] = {}

    def digest(*options: str) -> str:
        if options not in known:
            words = [str(SCRIPTS / SCRIPT), *options]
            flags = ["--nproc", "1", "--virtual", "4"]
            with LocalRun(tmp_path_factory.mktemp("carried") / "run", flags, words) as run:
                known[options] = finish(run)
            assert re.fullmatch("[0-9a-f]{64}", known[options])
        return known[options]

    return digest


def until_held(run: LocalRun, go: Path, workers: Sequence[int]) -> list[int]:
    """Wait until these workers are within their tasks of step STRUCK; return their pids."""
    marks = [Path(f"{go}.{worker}") for worker in workers]
    run.until(lambda: all(mark.exists() for mark in marks), RUN_S, f"step {STRUCK}")
    return [int(mark.read_text()) for mark in marks]


def check_ledger(run: LocalRun) -> None:
    report = verify(run.run_dir.path, plan_of)
    assert report.ok, report.findings
    assert report.steps == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_states_do_not_depend_on_the_number_of_workers(
    nproc: int, start: Start, carried: Callable[..., str]
) -> None:
    with start("--steps", str(STEPS), nproc=nproc, script=SCRIPT) as run:
        assert finish(run) == carried("--steps", str(STEPS))
    check_ledger(run)


@pytest.mark.slow
def test_the_hidden_state_matters(carried: Callable[..., str]) -> None:
    """Otherwise equal digests would prove little."""
    assert carried("--steps", str(STEPS), "--forget") != carried("--steps", str(STEPS))


@pytest.mark.parametrize(
    ("number", "victims"),
    [
        pytest.param(signal.SIGKILL, [1], marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, [0, 2], marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, [1], marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_struck_after_its_task_has_changed_the_states(
    number: int, victims: list[int], tmp_path: Path, start: Start, carried: Callable[..., str]
) -> None:
    go = tmp_path / "go"
    with start(*EVERYTHING, str(go), nproc=3, script=SCRIPT, options=HOSTS) as run:
        pids = until_held(run, go, range(3))
        for victim in victims:
            strike(pids[victim], number)
        go.touch()
        assert finish(run) == carried("--steps", str(STEPS))
    check_ledger(run)
    lost = run.events("lost")
    assert sorted(event["worker"] for event in lost) == victims
    assert number == signal.SIGKILL or "frozen" in lost[0]["text"]


@pytest.mark.slow
def test_a_lost_worker_that_comes_back_receives_the_states(
    tmp_path: Path, start: Start, carried: Callable[..., str]
) -> None:
    go = tmp_path / "go"
    words = [*EVERYTHING, str(go), "--rejoin", "8"]
    with start(*words, nproc=3, script=SCRIPT, options=HOSTS) as run:
        strike(until_held(run, go, range(3))[1])
        go.touch()
        assert finish(run) == carried("--steps", str(STEPS))
    check_ledger(run)
    views = [event["text"] for event in run.events("view")]
    assert any("worker 1 joins" in text for text in views[2:]), views


@pytest.mark.slow
def test_a_job_whose_every_process_was_killed_goes_on_with_the_states(
    tmp_path: Path, carried: Callable[..., str]
) -> None:
    go, store = tmp_path / "go", tmp_path / "store"
    options = ["--nproc", "2", "--virtual", "4", "--save-every", "2", "--store", str(store)]
    words = [str(SCRIPTS / SCRIPT), *EVERYTHING, str(go)]
    with LocalRun(tmp_path / "run", options, words) as run:
        until_held(run, go, range(2))
        # A resumed job begins from checkpoints that are on record; their files alone do not count.
        journal = run.run_dir.journal
        run.until(lambda: (r := read_record(journal)) and r.saved, RUN_S, "a checkpoint on record")
        strike(run.pid)
        until(lambda: not run.leftovers(), "the end of all processes")
    go.touch()
    command = ("resume", str(run.run_dir.path))
    with LocalRun(run.run_dir.path, [], [], command=command) as again:
        assert finish(again) == carried("--steps", str(STEPS))
    assert re.search(r"from the checkpoint of step [24]\b", str(again.events("view")))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("redundancy", "nodes"), [("replicate:2", 3), ("rs:2+1", 4)])
def test_all_workers_and_a_node_are_lost_and_the_states_are_in_memory(
    redundancy: str, nodes: int, tmp_path: Path, carried: Callable[..., str]
) -> None:
    go = tmp_path / "go"
    flags = ["--nproc", "1", "--virtual", "4", "--nodes-min", str(nodes), *HOSTS]
    flags += ["--redundancy", redundancy, "--protect-every", "3"]
    words = [str(SCRIPTS / SCRIPT), *EVERYTHING, str(go)]
    with LocalRun(tmp_path / "run", flags, words) as run, LocalNodes(run) as others:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        for name in names(nodes):
            others.add(name)
        pids = until_held(run, go, range(nodes))
        for pid in pids:
            strike(pid)
        others.kill("node1")
        go.touch()
        others.add("later")
        assert run.wait(RUN_S) == 0, run.log()
        assert carried("--steps", str(STEPS)) in set(others.last_lines())
    texts = [event["text"] for event in run.events("view")]
    assert any(f"from step {STRUCK}, as the nodes' memory has it" in text for text in texts), texts
    assert computed_twice(run) == []
