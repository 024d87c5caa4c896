"""Jobs of three nodes, each with a network of its own that is really cut.

The minority never commits a step, the majority soon continues, and the result equals the result of
an undisturbed run.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike
from labs.lab import LabRun
from labs.network_lab import Direction, Lab
from labs.relay import Relay
from places import TESTS

SCRIPT = TESTS / "scripts" / "trainer.py"
RUN_S = 100.0
LOSSY_S = 400.0
STEPS = 80
OPTIONS = ("--virtual", "6")
CALM = (str(SCRIPT), "--steps", str(STEPS))
WORDS = (*CALM, "--task-s", "0.03")
REJOIN = ("--until-members", str(STEPS - 10), "3")  # a node that comes back must find a job

pytestmark = [
    pytest.mark.skipif(bool(Lab.available()), reason=Lab.available() or "-"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the last line of the undisturbed run, on one node."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    with LocalRun(run_dir, ["--nproc", "2", *OPTIONS], CALM) as run:
        assert run.wait(RUN_S) == 0, run.log()
        return run.out[-1]


@pytest.fixture
def run(lab: Lab, tmp_path: Path) -> Iterator[LabRun]:
    with LabRun(lab, tmp_path / "run", OPTIONS, [*WORDS, *REJOIN]) as made:
        made.until_members(3)
        made.until(lambda: made.status()["step"] >= 10, RUN_S, "ten steps")
        yield made


def outcome(run: LabRun) -> str:
    assert run.wait(RUN_S) == 0, run.log()
    (line,) = run.last_lines()
    return line


def rejoined(run: LabRun) -> bool:
    """Return whether a later view had a worker of each node again."""
    return any("workers 0-2;" in event["text"] for event in run.events("view")[1:])


def until_step(run: LabRun, more: int = 1, within_s: float = RUN_S) -> float:
    """Wait for further committed steps; returns for how many seconds."""
    began, step = time.monotonic(), run.status()["step"]
    run.until(lambda: run.status()["step"] >= step + more, within_s, f"step {step + more}")
    return time.monotonic() - began


def worker_of(run: LabRun, node: str) -> dict[str, Any]:
    """Return the worker that runs on a node."""
    pids = {p for host in run.lab.hosts if f"node{host.index}" == node for p in host.pids()}
    return next(w for w in run.status()["workers"] if w["pid"] in pids)


def kernel_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


@pytest.mark.slow
def test_a_node_that_is_cut_off_stops_and_comes_back(run: LabRun, expected: str) -> None:
    lab = run.lab
    cut_off = worker_of(run, "node2")
    fault = lab.cut(lab.hosts[2])
    run.until(lambda: kernel_state(cut_off["pid"]) == "T", RUN_S, "its worker is paused")
    run.until(lambda: run.status()["view"] > 1, RUN_S, "the others go on without it")
    until_step(run, 3)
    assert kernel_state(cut_off["pid"]) in ("T", "gone")
    lab.heal(fault)
    assert outcome(run) == expected
    assert rejoined(run)


@pytest.mark.slow
def test_a_pair_of_nodes_that_lose_each_other(run: LabRun, expected: str) -> None:
    lab = run.lab
    fault = lab.cut_pair(lab.hosts[1], lab.hosts[2])
    run.until(lambda: run.status()["view"] > 1, RUN_S, "one of them is left out")
    until_step(run, 3)
    assert run.events("quarantined")
    lab.heal(fault)
    assert outcome(run) == expected
    assert rejoined(run)


@pytest.mark.slow
@pytest.mark.parametrize("direction", [Direction.IN, Direction.OUT])
def test_a_node_that_is_heard_or_hears_no_more(
    run: LabRun, expected: str, direction: Direction
) -> None:
    lab = run.lab
    fault = lab.cut(lab.hosts[2], direction)
    run.until(lambda: run.status()["view"] > 1, RUN_S, "the others go on without it")
    until_step(run, 3)
    lab.heal(fault)
    assert outcome(run) == expected
    assert rejoined(run)


@pytest.mark.slow
def test_a_node_that_dies_with_all_it_runs(run: LabRun, expected: str) -> None:
    run.lab.hosts[2].crash()
    run.until(lambda: run.status()["view"] > 1, RUN_S, "the others go on without it")
    until_step(run, 3)
    run.join(run.lab.hosts[2])  # under its old name
    assert outcome(run) == expected
    assert rejoined(run)


@pytest.mark.slow
def test_the_coordinators_node_is_cut_off_from_all_others(run: LabRun, expected: str) -> None:
    """Two of three workers are on the other side; only the coordinator's side may continue."""
    lab = run.lab
    others = [worker_of(run, name)["pid"] for name in ("node1", "node2")]
    fault = lab.cut(lab.hosts[0])
    run.until(lambda: run.status()["view"] > 1, RUN_S, "the coordinator's side goes on")
    assert all(kernel_state(pid) in ("T", "gone") for pid in others)
    until_step(run, 3)
    assert all(kernel_state(pid) in ("T", "gone") for pid in others)
    lab.heal(fault)
    assert outcome(run) == expected
    assert rejoined(run)


@pytest.mark.slow
def test_the_coordinator_dies_while_a_node_is_cut_off(run: LabRun, expected: str) -> None:
    lab = run.lab
    fault = lab.cut(lab.hosts[1])
    assert strike(run.status()["coordinator"]["pid"])
    run.until(lambda: recovered(run), RUN_S, "a new coordinator forms a view without it")
    until_step(run, 3)
    lab.heal(fault)
    assert outcome(run) == expected
    assert rejoined(run)


def recovered(run: LabRun) -> bool:
    with contextlib.suppress(HoldfastError):
        return bool(run.status()["view"] > 1)
    return False


@pytest.mark.slow
def test_training_goes_on_while_there_is_no_coordinator(run: LabRun, expected: str) -> None:
    """Its process is frozen for longer than any lease: steps are committed all the same."""
    pid = run.status()["coordinator"]["pid"]
    ledger = run.run_dir.path / "ledger"

    def written() -> int:
        return sum(file.stat().st_size for file in ledger.iterdir())

    strike(pid, signal.SIGSTOP)
    began, size = time.monotonic(), written()
    run.until(lambda: time.monotonic() > began + 6.0, RUN_S, "two leases have passed")
    now = written()
    strike(pid, signal.SIGCONT)
    assert now > size, "no step was committed"
    assert outcome(run) == expected
    assert [e for e in run.events("view") if e["view"] > 1] == []


@pytest.mark.slow
def test_a_node_behind_a_slow_path_is_waited_for(lab: Lab, tmp_path: Path, expected: str) -> None:
    """Everything that it begins, to the coordinator and to other workers, arrives late."""
    with (
        Relay(lab.hosts[2], delay_s=0.03, jitter_s=0.03),
        LabRun(lab, tmp_path / "run", OPTIONS, [*WORDS, *REJOIN]) as run,
    ):
        run.until_members(3)
        assert outcome(run) == expected
    assert run.events("lost") == []
    assert run.events("silent") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("percent", [5, 15, 30])
def test_a_network_that_loses_packets(run: LabRun, expected: str, percent: int) -> None:
    """TCP repeats lost packets after longer and longer pauses: a step takes seconds."""
    fault = run.lab.drop(run.lab.hosts[2], percent)
    until_step(run, 20, LOSSY_S)
    run.lab.heal(fault)
    assert outcome(run) == expected
