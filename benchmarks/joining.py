"""Joining: how long the other workers stand still while a worker joins, by the size of the state.

One of three workers is killed, and its successor joins: once while all wait until it has received
the state, and once fed while the other workers train. The stall is the gap between a survivor's
commits around the change of the view, less the usual one of the steps around it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recovery import Line, lines

from holdfast.engine.runtime.local_run import LocalRun

WORKERS = 3
SIZES_MB = (10, 100, 500, 1000, 2000)
JOINS = 5
RATE_MB = 500
UNHURRIED_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Times of one join, in seconds. `slowest`: of the steps while the worker was fed."""

    stall_s: float
    usual_s: float
    slowest_s: float
    took_s: float  # from the kill to the new worker's first task


def gaps_of(found: list[Line], worker: int) -> dict[int, float]:
    """Return the time that a worker took since the step before, by step."""
    ends = {x.step: x.at for x in found if x.worker == worker}
    return {step: at - ends[step - 1] for step, at in ends.items() if step - 1 in ends}


def one_join(run: LocalRun, *, feeds: bool) -> Join:
    """Kill worker 1, and watch its successor join."""
    members = run.until_members(WORKERS, UNHURRIED_S)
    seen = len(lines(run))
    run.until(lambda: len(lines(run)) > seen + 24, UNHURRIED_S, "some steps of all")
    killed_at = time.monotonic()
    os.kill(members[1], signal.SIGKILL)
    run.until(lambda: _works(lines(run), killed_at), UNHURRIED_S, "the new worker's tasks")
    seen = len(lines(run))
    run.until(lambda: len(lines(run)) > seen + 12, UNHURRIED_S, "some steps after it")
    found = lines(run)
    began = min((x for x in found if x.worker == 1 and x.at > killed_at and x.tasks), key=_at)
    joined = began.step - feeds  # a fed worker hosts no task in its first step
    lost = min((x for x in found if x.worker != 1 and x.at > killed_at), key=_at).step
    stalls, usual, slowest = [], [], []
    for worker in (0, 2):
        gaps = gaps_of(found, worker)
        beside = [gaps[s] for s in range(joined - 3, joined + 4) if s in gaps and s != joined]
        usual.append(statistics.median(beside))
        stalls.append(gaps[joined] - usual[-1])
        slowest += [gaps[s] for s in range(lost + 2, joined) if s in gaps]
    return Join(
        stall_s=max(stalls),
        usual_s=statistics.median(usual),
        slowest_s=max(slowest, default=0.0),
        took_s=began.at - killed_at,
    )


def _at(line: Line) -> float:
    return line.at


def _works(found: list[Line], since: float) -> bool:
    return any(x.worker == 1 and x.at > since and x.tasks for x in found)


def measure(size_mb: int, *, feeds: bool, joins: int = JOINS) -> list[Join]:
    """Measure joins of a worker to a job with a state of `size_mb` megabytes."""
    script = str(Path(__file__).with_name("joining_worker.py"))
    rate = RATE_MB if feeds else 0
    options = ["--nproc", str(WORKERS), "--join-rate", str(rate), "--join-pause", "0"]
    options += ["--fingerprint-steps", "4", "--repeat-steps", "0"]
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalRun(Path(folder) / "run", options, [script, str(size_mb), "1000000"]) as run,
    ):
        for number in range(joins):
            found.append(one_join(run, feeds=feeds))
            how = "fed" if feeds else "in a pause"
            print(f"  {size_mb} MB, {how}, join {number + 1}: {found[-1]}", flush=True)
    return found


def lines_of_sheet() -> Iterator[str]:
    """Yield the sheet's section."""
    yield "## Joining, by the size of the state"
    yield ""
    yield f"One of {WORKERS} workers is killed and replaced, {JOINS} times; tasks of 50 ms that"
    yield f"leave the processor alone. Fed at {RATE_MB} MB/s by each member, or while all wait."
    yield "Target: a stall of 50 ms, whatever the size. All share the processors with the new"
    yield "worker, so that steps are slower while it is fed."
    yield ""
    yield "| state | stall in a pause | stall when fed | a step | the slowest while it is fed |"
    yield "|---|---|---|---|---|"
    for size in SIZES_MB:
        pause, fed = measure(size, feeds=False), measure(size, feeds=True)
        stalls = [statistics.median(j.stall_s for j in each) * 1e3 for each in (pause, fed)]
        usual = statistics.median(j.usual_s for j in fed) * 1e3
        slowest = statistics.median(j.slowest_s for j in fed) * 1e3
        yield (
            f"| {size} MB | {stalls[0]:.0f} ms | **{stalls[1]:.0f} ms** "
            f"| {usual:.0f} ms | {slowest:.0f} ms |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=100, metavar="MB")
    parser.add_argument("--joins", type=int, default=JOINS)
    options = parser.parse_args()
    for feeds in (False, True):
        found = measure(options.size, feeds=feeds, joins=options.joins)
        stall = statistics.median(each.stall_s for each in found)
        print(f"{'fed' if feeds else 'in a pause'}: median stall {stall * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
