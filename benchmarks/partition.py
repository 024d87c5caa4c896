"""Pauses of a job of three nodes, from a fault to the next committed step, with real networks.

A node is cut off from all other nodes, or from one; or the coordinator is killed, after which there
should be no pause at all.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.runtime.local_run import strike
from labs.lab import LabRun
from labs.network_lab import Fault, Lab

SCRIPT = Path(__file__).with_name("recovery_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Seconds between two commits around a fault, on the side that continues; medians and most."""

    what: str
    times: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times)


def commits(run: LabRun) -> list[float]:
    """Return when the leader's node committed steps, by the clock that all hosts share."""
    return sorted(float(x.split()[3]) for x in list(run.out) if x.startswith("STEP "))


def pause_after(run: LabRun, at: float, settle_s: float) -> float:
    """Return the longest gap between commits from the fault on."""
    time.sleep(settle_s)
    times = commits(run)
    begin = max(t for t in times if t <= at)
    around = [begin, *(t for t in times if t > at)]
    return max(b - a for a, b in itertools.pairwise(around))


def cut_node(run: LabRun) -> Fault:
    return run.lab.cut(run.lab.hosts[2])


def cut_pair(run: LabRun) -> Fault:
    return run.lab.cut_pair(run.lab.hosts[1], run.lab.hosts[2])


def kill_coordinator(run: LabRun) -> None:
    strike(run.status()["coordinator"]["pid"])


CASES: dict[str, Callable[[LabRun], Fault | None]] = {
    "a node is cut off from all other nodes": cut_node,
    "two nodes are cut off from each other": cut_pair,
    "the coordinator is killed": kill_coordinator,
}


def measure(what: str, count: int) -> Pause:
    times = []
    for _ in range(count):
        with (
            tempfile.TemporaryDirectory() as folder,
            Lab(3) as lab,
            LabRun(lab, Path(folder) / "run", ["--virtual", "3"], [str(SCRIPT), "100000"]) as run,
        ):
            run.until_members(3)
            run.until(lambda: len(commits(run)) > 30, 60.0, "30 steps")
            at = time.monotonic()
            CASES[what](run)
            times.append(pause_after(run, at, settle_s=8.0))
    return Pause(what=what, times=tuple(times))


def main() -> None:
    for what in CASES:
        pause = measure(what, 3)
        print(f"{what}: median {pause.median_s:.2f} s, most {max(pause.times):.2f} s", flush=True)


if __name__ == "__main__":
    main()
