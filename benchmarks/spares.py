"""Spares: how long a job of one worker stands still when that worker is killed.

Jobs with a hot spare, with a warm one and with none, in turn; each writes a checkpoint after every
step, so that all of them lose at most one. The time runs from the kill to the next step that
comes to its end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.testing.local_run import LocalRun, strike

KINDS = {"hot": ["--spares", "1", "--hot-spares"], "warm": ["--spares", "1"], "none": []}
KILLS = 5
UNHURRIED_S = 300.0
STEP_S = 0.05
SCRIPT = """
import sys, time, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(int(sys.argv[2]), 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, int(sys.argv[2]))), batch_size=4)
told = open(sys.argv[1], "a", buffering=1)
for step in job.steps(data, until=1_000_000):
    for (x,) in step:
        time.sleep(float(sys.argv[3]))
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    told.write(f"{step.index} {job.worker} {time.monotonic()}\\n")
"""


def steps_of(path: Path) -> list[tuple[int, int, float]]:
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), int(worker), float(at)) for step, worker, at in lines]


def workers(run: LocalRun, *states: str) -> list[dict[str, Any]]:
    return [each for each in run.status()["workers"] if each["state"] in states]


def one(kind: str, width: int) -> tuple[float, int]:
    """Kill the only worker once; returns seconds to the next step, and how many steps were lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, told = folder / "train.py", folder / "told.txt"
        script.write_text(SCRIPT)
        options = ["--nproc", "1", "--join-pause", "0", *KINDS[kind]]
        options += ["--store", str(folder / "store"), "--save-every", "1"]
        words = [str(script), str(told), str(width), str(STEP_S)]
        with LocalRun(folder / "run", options, words) as run:
            run.until_members(1)
            waits = {"hot": "hot spare", "warm": "spare"}.get(kind)
            if waits:
                run.until(lambda: workers(run, waits), UNHURRIED_S, waits)
            enough = len(steps_of(told)) + 20
            run.until(lambda: len(steps_of(told)) >= enough, UNHURRIED_S, "steps")
            victim = workers(run, "computing", "waiting")[0]
            before, at = steps_of(told), time.monotonic()
            assert strike(victim["pid"], 9)
            last = max(step for step, _, _ in before)
            run.until(lambda: steps_of(told)[-1][2] > at + STEP_S, UNHURRIED_S, "a step")
            after = next(each for each in steps_of(told) if each[2] > at + STEP_S)
    return after[2] - at, max(last + 1 - after[0], 0)


def measure(kills: int, width: int) -> Iterator[tuple[str, list[float], int]]:
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
    for _ in range(kills):
        for kind in KINDS:
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
