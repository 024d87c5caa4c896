"""Spares: how long a job of one worker stands still when that worker is killed.

Jobs with a hot spare, with a warm one and with none, in turn; each writes a checkpoint after every
step, so that all of them lose at most one. The time runs from the kill to the end of the next step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from struck_worker import SPARES, strike_worker

from holdfast.engine.runtime.local_run import LocalRun

KILLS = 5
UNHURRIED_S = 300.0
STEP_S = 0.05
SCRIPT = Path(__file__).with_name("spares_worker.py")


def one(kind: str, width: int) -> tuple[float, int]:
    """Kill the only worker once; returns seconds to the next step, and how many steps were lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = folder / "told.txt"
        options = ["--nproc", "1", "--join-pause", "0", *SPARES[kind]]
        options += ["--store", str(folder / "store"), "--save-every", "1"]
        words = [str(SCRIPT), str(told), str(width), str(STEP_S)]
        with LocalRun(folder / "run", options, words) as run:
            found = strike_worker(run, told, kind, 1, limit_s=UNHURRIED_S, grace_s=STEP_S)
    return found.ends[0][2] - found.at, found.steps_again


def measure(kills: int, width: int) -> Iterator[tuple[str, list[float], int]]:
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in SPARES}
    for _ in range(kills):
        for kind in SPARES:
            found[kind].append(one(kind, width))
    for kind, each in found.items():
        yield kind, [seconds for seconds, _ in each], max(lost for _, lost in each)


def lines() -> Iterator[str]:
    """Yield the sheet's section."""
    yield "## The only worker is killed"
    yield ""
    yield f"Steps of {STEP_S * 1e3:.0f} ms with a checkpoint after each; {KILLS} kills of each"
    yield "kind, in turn."
    yield ""
    yield "| spare | state, MB | kill to the next step, median | max | steps done again |"
    yield "|---|---|---|---|---|"
    for width in (1_000, 25_000):
        for kind, seconds, lost in measure(KILLS, width):
            median, most = statistics.median(seconds), max(seconds)
            state = width * 1000 * 4 * 2 / 1e6
            yield f"| {kind} | {state:.0f} | **{median:.2f} s** | {most:.2f} s | {lost} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--width", type=int, default=1_000)
    options = parser.parse_args()
    for kind, seconds, lost in measure(options.kills, options.width):
        median, most = statistics.median(seconds), max(seconds)
        print(f"{kind}: median {median:.2f} s, max {most:.2f} s, {lost} steps done again")


if __name__ == "__main__":
    main()
