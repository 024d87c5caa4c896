"""Records when each step ended on each worker: training scripts write, benchmarks read.

A file holds one line for each step and worker: step, worker, monotonic seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

Ends = Sequence[tuple[int, int, float]]  # step, worker, monotonic seconds


def tell_end(told: Path, step: int, worker: int) -> None:
    """Write that a step has ended now; in one write, since several processes share the file."""
    with told.open("a") as file:
        file.write(f"{step} {worker} {time.monotonic()}\n")


def read_ends(told: Path) -> list[tuple[int, int, float]]:
    """Return the ends that are written so far, in that order."""
    lines = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
    return [(int(step), int(worker), float(at)) for step, worker, at in lines]


def durations(ends: Ends) -> dict[int, float]:
    """Return the seconds from the end of the step before, by step, on the last worker each time."""
    last: dict[int, float] = {}
    for step, _, at in ends:
        last[step] = max(at, last.get(step, at))
    return {step: at - last[step - 1] for step, at in last.items() if step - 1 in last}


def usual_ms(ends: Ends, warm_up: int) -> float:
    """Return the median milliseconds of a step, after the first `warm_up`."""
    found = [seconds for step, seconds in durations(ends).items() if step > warm_up]
    return statistics.median(found) * 1e3
