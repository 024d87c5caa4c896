"""The cost of a step for a process, against DistributedDataParallel on gloo, in separate launches.

CPU time of whole processes, all their threads, as the kernel counts it: on a machine with other
work it is more reliable than wall time. Launches of the two libraries take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_launch import STEADY, run_ddp

from holdfast.engine.runtime.local_run import LocalRun

MODELS = ("mlp", "conv", "small")
WORKERS = (2, 4)
ROUNDS = 5
RUN_S = 900.0
FIGURES = ("cpu_s", "system_s", "wall_s", "faults", "threads", "connections", "private_mb")
SCRIPT = Path(__file__).with_name("step_cost_worker.py")

Run = Callable[[Path, list[str], int], None]  # folder, arguments of the script, processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Costs of one launch for each step: means over its processes."""

    cpu_s: float
    system_s: float  # the part of the CPU time that the kernel worked
    wall_s: float
    faults: float  # page faults
    threads: float  # number in a process, as its last step ends
    connections: float  # over TCP
    private_mb: float  # memory that no other process shares
    parameters: int
    digests: tuple[str, ...]  # all different digests of the final models


@dataclass(slots=True)
class StepCost:
    """Makes the launches of both libraries with one model and `workers` workers."""

    model: str
    workers: int
    ddp: list[Launch] = field(default_factory=list)
    holdfast: list[Launch] = field(default_factory=list)

    def median(self, library: str, figure: str) -> float:
        return statistics.median(getattr(each, figure) for each in getattr(self, library))

    def ratio(self, figure: str) -> float:
        """Return the ratio of the medians, Holdfast to DDP."""
        return self.median("holdfast", figure) / self.median("ddp", figure)


def measure(
    model: str, workers: int, rounds: int = ROUNDS, options: Sequence[str] = ()
) -> StepCost:
    """Launch both libraries in turn. `options`: more of the script's."""
    found = StepCost(model, workers)
    for number in range(rounds):
        _say(f"{model}, {workers} workers: round {number + 1} of {rounds}")
        found.ddp.append(_launch(_run_ddp, model, workers, options))
        found.holdfast.append(_launch(_run_holdfast, model, workers, options))
    return found


def row(found: StepCost) -> str:
    """Return the row of the table."""
    cells = [found.model, f"{found.ddp[0].parameters / 1e6:.2f} M", str(found.workers)]
    for figure in ("cpu_s", "wall_s"):
        for library in ("ddp", "holdfast"):
            cells.append(f"{found.median(library, figure) * 1e3:.2f}")
        cells.append(f"**{found.ratio(figure):.3f}**")
    for library in ("ddp", "holdfast"):
        cells.append(f"{found.median(library, 'faults'):.0f}")
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| model | parameters | workers | CPU ms, DDP | Holdfast | ratio | wall ms, DDP | Holdfast "
    "| ratio | page faults, DDP | Holdfast |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def _launch(run: Run, model: str, workers: int, options: Sequence[str] = ()) -> Launch:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        run(folder, ["--model", model, "--out", str(out), *options], workers)
        told = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    if len(told) != workers:
        raise RuntimeError(f"{len(told)} of {workers} processes have told what they spent")
    means = {figure: statistics.mean(each[figure] for each in told) for figure in FIGURES}
    digests = tuple(sorted({each["digest"] for each in told}))
    return Launch(**means, parameters=told[0]["parameters"], digests=digests)


def _run_holdfast(folder: Path, arguments: list[str], workers: int) -> None:
    command = [str(SCRIPT), "--library", "holdfast", *arguments]
    with LocalRun(folder / "run", ["--nproc", str(workers), *STEADY], command) as run:
        if run.wait(RUN_S) != 0:
            raise RuntimeError(run.log())


def _run_ddp(_: Path, arguments: list[str], workers: int) -> None:
    run_ddp(SCRIPT, ["--library", "ddp", *arguments], workers, RUN_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS, metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--json", action="store_true", help="print every launch instead of a table")
    options = parser.parse_args()
    cases = [(model, workers) for model in options.models for workers in options.workers]
    if not options.json:
        print(*HEAD, sep="\n", flush=True)
    found: list[StepCost] = []
    for model, workers in cases:
        found.append(measure(model, workers, options.rounds))
        if not options.json:
            print(row(found[-1]), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
