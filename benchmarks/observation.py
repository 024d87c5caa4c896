"""Measures what the observation of a job costs each step: ledger, digests and times of workers.

One job switches both off and on again in turn, a block of steps each, so that the two blocks of a
pair run one after the other in the same processes. At the end the calls themselves are timed, which
is more reliable where other work makes the blocks of a pair differ. Events are not measured: a step
without a fault writes none.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_launch import STEADY
from step_cost_worker import TASKS, made_up
from torch import nn, optim
from whole_batches import as_is

import holdfast
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.script.ledger_recorder import LedgerRecorder
from holdfast.engine.train.step.gradient_digest import PartDigest
from holdfast.engine.train.step.time_sheet import TimeSheet

RUN_S = 900.0
BLOCKS = {"mlp": 8, "small": 60}  # steps of each
WARM_UP = 10
OBSERVERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (TimeSheet, ("enter", "wait", "expect", "note_engine", "note_left", "take")),
    (LedgerRecorder, ("commit",)),
)
DIGESTS: tuple[Any, tuple[str, ...]] = (PartDigest, ("begin", "note", "take"))


def do_nothing(*_: object, **__: object) -> int:
    """Stand in for a method that observes; returns the digest that was not taken."""
    return 0


class Switch:
    """Replaces the methods that observe by empty ones, and puts them back."""

    def __init__(self) -> None:
        self.seconds: dict[Any, float] = {}  # seconds of the calls, by their class
        self._kept: list[tuple[Any, str, Callable[..., Any]]] = [
            (owner, name, getattr(owner, name))
            for owner, names in (*OBSERVERS, DIGESTS)
            for name in names
        ]

    def time_calls(self) -> None:
        """Add up the CPU seconds of all calls in `seconds`, those of the clock's readings too."""
        for owner, name, method in self._kept:
            self.seconds[owner] = 0.0
            setattr(owner, name, self._timed(owner, method))

    def _timed(self, owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*words: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*words, **named)
            finally:
                self.seconds[owner] += time.thread_time() - began

        return call

    def turn(self, *, on: bool) -> None:
        """Switch the observation of this process on or off."""
        for owner, name, method in self._kept:
            setattr(owner, name, method if on else do_nothing)


def train(model_name: str, pairs: int, out: Path) -> None:
    """Run one worker: write the CPU and wall seconds a step of each block."""
    job, task, size = holdfast.join(), TASKS[model_name], BLOCKS[model_name]
    model = task.make()
    optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(made_up(task.shape), task.batch, drop_last=True, collate_fn=as_is)
    switch, blocks = Switch(), []
    began = (0.0, 0.0)
    for step in job.steps(data, until=WARM_UP + (2 * pairs + 1) * size):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        number, within = divmod(step.index + 1 - WARM_UP, size)
        if number < 0 or within:
            continue
        now = (time.process_time(), time.perf_counter())
        if number:
            blocks.append([(b - a) / size for a, b in zip(began, now, strict=True)])
        if number == 2 * pairs:
            switch.time_calls()
        else:
            switch.turn(on=number % 4 in (0, 3))  # on, off, off, on: a drift cancels out
        began = (time.process_time(), time.perf_counter())
    digests = switch.seconds.pop(PartDigest) / size
    calls = sum(switch.seconds.values()) / size
    timed = {"calls": calls, "digests": digests, "timed": blocks[-1][0]}
    found = {"blocks": blocks[:-1], **timed}
    (out / f"{job.worker}.json").write_text(json.dumps(found))


def measure(
    model: str, pairs: int, workers: int, digest_steps: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the shares of the timed calls (digests apart), and of each pair the ratios of times.

    These are of CPU time and of wall time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["--worker", str(folder), "--model", model, "--pairs", str(pairs)]
        options = ["--nproc", str(workers), "--digest-steps", str(digest_steps), *STEADY]
        with LocalRun(folder / "run", options, [str(Path(__file__)), *words]) as run:
            if run.wait(RUN_S) != 0:
                raise RuntimeError(run.log())
        every = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    ratios = []
    for blocks in (each["blocks"] for each in every):
        for number in range(0, len(blocks) - 1, 2):
            first, second = blocks[number : number + 2]
            on, off = (first, second) if number % 4 == 0 else (second, first)
            ratios.append((on[0] / off[0], on[1] / off[1]))
    for each in every:
        print(
            f"{model}: {1e6 * each['calls']:.0f} us, and {1e6 * each['digests']:.0f} us for "
            f"digests, of {1e3 * each['timed']:.2f} ms CPU a step",
            file=sys.stderr,
        )
    shares = [(each["calls"] / each["timed"], each["digests"] / each["timed"]) for each in every]
    return shares, ratios


def describe(values: list[float]) -> str:
    """Return the median of ratios as a percentage, with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return " | ".join(f"{100 * (v - 1):+.2f} %" for v in (middle, low, high))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=BLOCKS)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--digest-steps", type=int, default=64)
    options = parser.parse_args()
    if options.worker is not None:
        train(options.model, options.pairs, options.worker)
        return
    print(
        "| model | calls, share of CPU | digests | pairs | CPU, median | quartiles | | wall | "
        "quartiles | |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in [options.model] if options.model else BLOCKS:
        shares, ratios = measure(model, options.pairs, options.workers, options.digest_steps)
        cells = " | ".join(describe([each[k] for each in ratios]) for k in (0, 1))
        calls, digests = map(max, zip(*shares, strict=True))
        print(f"| {model} | {calls:.2%} | {digests:.2%} | {len(ratios)} | {cells} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
