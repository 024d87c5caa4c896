"""Recovery: from the moment a worker dies (or freezes) to the survivors' next committed step.

The pause is the figure that `holdfast explain` prints: from the first sign of the fault to the
next committed step. The stall is its part without work: the gap between the survivors' commits
around the fault, minus an undisturbed step, minus the tasks that a survivor had to compute again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from recovery_worker import TASK_S

from holdfast.engine.records.incidents import list_incidents
from holdfast.engine.runtime.local_run import LocalRun, strike

WORKERS = 4
RUN_S = 300.0  # limit for each wait: 64 workers need long on few cores


@dataclass(frozen=True, slots=True)
class Recoveries:
    """Seconds of each fault of one run: stalls, from the fault to the next commit, and pauses."""

    stalls: list[float]
    gaps: list[float]
    pauses: list[float]


@dataclass(frozen=True, slots=True)
class Line:
    """Is the end of one step, as one worker saw it."""

    worker: int
    step: int
    at: float  # monotonic seconds
    tasks: int


def lines(run: LocalRun) -> list[Line]:
    found = []
    for text in list(run.out):
        if text.startswith("STEP "):
            _, worker, step, at, tasks = text.split()
            found.append(Line(int(worker), int(step), float(at), int(tasks)))
    return found


def stall_s(found: list[Line], victim: int, struck_at: float) -> tuple[float, float]:
    """Return stall and gap in seconds, over the survivors, around a fault at `struck_at`."""
    survivors = [x for x in found if x.worker != victim]
    after = [x for x in survivors if x.at > struck_at]
    step = min(x.step for x in after)
    ended = [x for x in after if x.step == step]
    before = [x for x in survivors if x.step == step - 1]
    steps = sorted({x.step for x in survivors if x.step < step})[-12:]
    ends = [max(x.at for x in survivors if x.step == s) for s in steps]
    usual = statistics.median(b - a for a, b in itertools.pairwise(ends))
    gap = max(x.at for x in ended) - max(x.at for x in before)
    again = TASK_S * max(x.tasks - 1 for x in ended)
    return gap - usual - again, max(x.at for x in ended) - struck_at


def join_s(found: list[Line], victim: int, struck_at: float) -> float:
    """Return the time of a replaced worker's first step, less a usual step."""
    first = next(x.step for x in found if x.worker == victim and x.at > struck_at)
    ends = {s: max(x.at for x in found if x.step == s) for s in {x.step for x in found}}
    steps = sorted(ends)
    usual = statistics.median(ends[b] - ends[a] for a, b in itertools.pairwise(steps))
    return ends[first] - ends[first - 1] - usual


def one_fault(
    run: LocalRun, rng: random.Random, number: int, workers: int
) -> tuple[float, float, int]:
    """Strike a random member once all are there and steady; (stall, gap, victim)."""
    run.until_members(workers, RUN_S)
    seen = max((x.step for x in lines(run)), default=0)
    steady = seen + 12
    run.until(lambda: max((x.step for x in lines(run)), default=0) > steady, RUN_S, "12 steps")
    members = run.until_members(workers, RUN_S)
    victim = rng.choice(sorted(members))
    time.sleep(rng.uniform(0, 2 * TASK_S))  # at any point of a step
    struck_at = time.monotonic()
    strike(members[victim], number)

    def went_on() -> bool:
        return sum(x.at > struck_at and x.worker != victim for x in lines(run)) >= 3 * (workers - 1)

    def is_back() -> bool:  # all have ended its first step once it has ended the second
        return sum(x.worker == victim and x.at > struck_at for x in lines(run)) >= 2

    run.until(went_on, RUN_S, "the survivors' next steps")
    stall, gap = stall_s(lines(run), victim, struck_at)
    run.until(is_back, RUN_S, "two steps of the worker that takes its place")
    joined = join_s(lines(run), victim, struck_at)
    print(f"  worker {victim} joins again: {joined * 1e3:.0f} ms beside a step")
    return stall, gap, victim


def measure(faults: int, number: int, seed: int, workers: int = WORKERS) -> Recoveries:
    """Strike one run `faults` times."""
    rng = random.Random(seed)
    stalls, gaps = [], []
    script = str(Path(__file__).with_name("recovery_worker.py"))
    with tempfile.TemporaryDirectory() as folder:
        options = ["--nproc", str(workers)]
        with LocalRun(Path(folder) / "run", options, [script, "1000000"]) as run:
            for _ in range(faults):
                stall, gap, victim = one_fault(run, rng, number, workers)
                stalls.append(stall)
                gaps.append(gap)
                print(f"  worker {victim}: stall {stall * 1e3:.0f} ms, next commit in {gap:.2f} s")
            # A busy machine has other incidents: workers that are late for a moment.
            found = [
                incident
                for incident in list_incidents(run.events())
                if incident.cost and any(event["kind"] == "lost" for event in incident.events)
            ]
    return Recoveries(stalls, gaps, [incident.cost["pause_s"] for incident in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--freezes", type=int, default=5)
    parser.add_argument("--workers", type=int, default=WORKERS)
    options = parser.parse_args()
    workers = options.workers
    print(f"kill -9 of one of {workers} workers:")
    found = measure(options.kills, signal.SIGKILL, 1, workers)
    for name, times in (("pause", found.pauses), ("stall", found.stalls)):
        middle, most = statistics.median(times) * 1e3, max(times) * 1e3
        print(f"  {name}: median {middle:.0f} ms, max {most:.0f} ms, of {len(times)}")
    if not options.freezes:
        return
    print(f"kill -STOP of one of {workers} workers:")
    gaps = measure(options.freezes, signal.SIGSTOP, 2, workers).gaps
    print(
        f"  median time to the next commit {statistics.median(gaps):.2f} s, max {max(gaps):.2f} s"
    )


if __name__ == "__main__":
    main()
