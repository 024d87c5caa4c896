"""What a step costs as the number of workers grows, against DistributedDataParallel on gloo.

Each library has its own launches, in turn, with the small model of step_cost.py. Besides the times
of a step: threads, connections and memory of a worker. The result is in MANY_WORKERS.md.
"""

from __future__ import annotations

import argparse

from step_cost import ROUNDS, StepCost, measure

WORKERS = (4, 16, 32, 64)
STEPS = {4: 200, 16: 60, 32: 30, 64: 15}
HEAD = (
    "| workers | CPU ms, DDP | Holdfast | ratio | wall ms, DDP | Holdfast | ratio "
    "| threads, DDP | Holdfast | connections, DDP | Holdfast | MB, DDP | Holdfast |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def row(found: StepCost) -> str:
    """Return the row of the table: medians over the rounds, each a mean over the workers."""
    cells = [str(found.workers)]
    for figure in ("cpu_s", "wall_s"):
        cells += [f"{found.median(each, figure) * 1e3:.1f}" for each in ("ddp", "holdfast")]
        cells.append(f"**{found.ratio(figure):.2f}**")
    for figure in ("threads", "connections", "private_mb"):
        cells += [f"{found.median(each, figure):.0f}" for each in ("ddp", "holdfast")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS, metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    options = parser.parse_args()
    print(*HEAD, sep="\n", flush=True)
    for workers in options.workers:
        steps = STEPS.get(workers, 30)
        found = measure("small", workers, options.rounds, ["--steps", str(steps)])
        print(row(found), flush=True)


if __name__ == "__main__":
    main()
