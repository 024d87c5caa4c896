"""Answers that a dead worker had half written are written again, by another worker, as before."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import RUN_S, Start, finish
from example_kit import EXAMPLES
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.data.sampling import plan_of

WARM_UP, STEPS, VIRTUAL, PROMPTS, GROUP = 12, 6, 4, 5, 8
HELD = WARM_UP + 2  # the step in whose rollouts workers are struck
# The job counts the evaluation after the warm-up, and both rounds of each step of GRPO.
ROUND = WARM_UP + 1 + 2 * (HELD - WARM_UP)
WORDS = ("--warm-up", str(WARM_UP), "--steps", str(STEPS), "--print-every", "1")
WORDS = (*WORDS, "--batch-size", str(PROMPTS), "--group", str(GROUP), "--width", "24")
# Late or slow, a worker would host no task of the step in which it is to be struck.
HOSTS = ("--no-rebalance", "--speculation-budget", "0")


def rollouts_of(run: LocalRun) -> list[str]:
    """Return the lines on the steps of GRPO: the numbers, lengths and rewards of the answers."""
    lines = [line for line in run.out if line.startswith("step ")]
    return [line[: line.rindex(",")] for line in lines]  # without the time


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """Return the digest and the rollouts of a run on one worker with the same virtual ranks."""
    flags = ["--nproc", "1", "--virtual", str(VIRTUAL)]
    script = [str(EXAMPLES / "grpo.py"), *WORDS]
    with LocalRun(tmp_path_factory.mktemp("grpo") / "run", flags, script) as run:
        last = finish(run)
    assert re.fullmatch("[0-9a-f]{64}", last)
    found = rollouts_of(run)
    assert len(found) == STEPS
    answers = VIRTUAL * PROMPTS * GROUP
    assert all(f": {answers} answers of " in line for line in found)
    return last, found


def until_held(run: LocalRun, go: Path, workers: Sequence[int]) -> list[int]:
    """Wait until these workers are in the middle of a rollout; return their process ids."""
    marks = [Path(f"{go}.{worker}") for worker in workers]
    run.until(lambda: all(mark.exists() for mark in marks), RUN_S, f"rollouts of step {HELD}")
    return [int(mark.read_text()) for mark in marks]


def check_ledger(run: LocalRun) -> None:
    """Check that each prompt was used once: a step of GRPO has two rounds with the same ones."""
    report = verify(run.run_dir.path, plan_of)
    assert report.ok, report.findings
    assert report.samples == (WARM_UP + STEPS) * VIRTUAL * PROMPTS


@pytest.mark.parametrize(
    ("nproc", "victims", "number"),
    [
        (3, [1], signal.SIGKILL),
        pytest.param(2, [1], signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, [0, 2], signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, [1], signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_struck_in_the_middle_of_its_rollout(
    nproc: int,
    victims: list[int],
    number: int,
    tmp_path: Path,
    start: Start,
    undisturbed: tuple[str, list[str]],
) -> None:
    digest, rollouts = undisturbed
    go = tmp_path / "go"
    words = [str(HELD), str(go), *WORDS]
    with start(*words, nproc=nproc, script="held_rollout.py", options=HOSTS) as run:
        pids = until_held(run, go, range(nproc))
        for victim in victims:
            strike(pids[victim], number)
        go.touch()
        assert finish(run) == digest
    lost = run.events("lost")
    assert sorted(event["worker"] for event in lost) == victims
    assert number == signal.SIGKILL or "frozen" in lost[0]["text"]
    views = [event["text"] for event in run.events("view")]
    assert any(f"step {ROUND} is redone for the lost virtual ranks" in v for v in views), views
    check_ledger(run)
    if 0 not in victims:  # the leader, which prints
        assert rollouts_of(run) == rollouts
