"""Jobs of three nodes, each with a network of its own that is really cut.

The minority never commits a step, the majority soon goes on, and the result is that of a run that
nothing happened to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.lab import LabRun
from holdfast.testing.network import Direction, Lab
from holdfast.testing.run import LocalRun

SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
RUN_S = 100.0
STEPS = 120
OPTIONS = ("--virtual", "6")
WORDS = (str(SCRIPT), "--steps", str(STEPS), "--task-s", "0.03")

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
    """The last line of the run that nothing happens to, on one node."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    with LocalRun(run_dir, ["--nproc", "2", *OPTIONS], WORDS) as run:
        assert run.wait(RUN_S) == 0, run.story()
        return run.out[-1]


@pytest.fixture
def run(lab: Lab, tmp_path: Path) -> Iterator[LabRun]:
    with LabRun(lab, tmp_path / "run", OPTIONS, WORDS) as made:
        made.until_members(3)
        made.until(lambda: made.status()["step"] >= 10, RUN_S, "ten steps")
        yield made


def outcome(run: LabRun) -> str:
    assert run.wait(RUN_S) == 0, run.story()
    return run.out[-1]


def until_step(run: LabRun, more: int = 1) -> float:
    """Wait for further committed steps; returns for how many seconds."""
    began, step = time.monotonic(), run.status()["step"]
    run.until(lambda: run.status()["step"] >= step + more, RUN_S, f"step {step + more}")
    return time.monotonic() - began


def worker_of(run: LabRun, node: str) -> dict[str, Any]:
    """The worker that runs on a node."""
    pids = {p for host in run.lab.hosts if f"node{host.index}" == node for p in host.pids()}
    return next(w for w in run.status()["workers"] if w["pid"] in pids)


def kernel_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def test_a_node_that_is_cut_off_stops_and_comes_back(run: LabRun, expected: str) -> None:
    lab = run.lab
    cut_off = worker_of(run, "node2")
    fault = lab.cut(lab.hosts[2])
    run.until(lambda: kernel_state(cut_off["pid"]) == "T", RUN_S, "its worker is suspended")
    run.until(lambda: run.status()["view"] > 1, RUN_S, "the others go on without it")
    until_step(run, 3)
    assert kernel_state(cut_off["pid"]) in ("T", "gone")
    lab.heal(fault)
    run.until_members(3, RUN_S)
    assert outcome(run) == expected
