"""Results of papers on parameter servers, and what the same experiment gives here.

    python benchmarks/table_papers.py [downpour portions replicas aggregation staleness]

Dean et al., "Large Scale Distributed Deep Networks" (2012): downpour, portions, replicas. Li et
al., "Scaling distributed machine learning with the parameter server" (2014): aggregation,
staleness. Tasks of `portions` and `replicas` wait instead of computing, so workers do not compete
for this machine's cores.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from stragglers import run_job
from torch import nn
from torch.nn import functional as F

from holdfast.tables import SGD, Adagrad, RowOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "recipes"))
from downpour import Downpour

from lone_step import train_step

REPLICAS = (1, 4, 16, 64)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
TARGET = 0.7  # cross entropy on samples that were not trained on
ROUNDS_MAX = 3000
INPUTS, CLASSES, MINIBATCH = 200, 10, 32
FORMS: dict[str, Callable[[float], RowOptimizer]] = {
    "SGD": lambda lr: SGD(lr=lr),
    "Adagrad": lambda lr: Adagrad(lr=lr),
}

# ---------------------------------------------------------------- Downpour


@functools.cache
def scales() -> torch.Tensor:
    """Return the size of each input: few are common, as with words of a text."""
    return torch.arange(1, INPUTS + 1).float() ** -0.5


def samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [count, INPUTS], and the classes that a teacher gives them."""
    teacher = torch.Generator().manual_seed(7)
    weights = torch.randn(INPUTS, CLASSES, generator=teacher) / scales()[:, None]
    dice = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, INPUTS, generator=dice) * scales()
    return inputs, (inputs @ weights).argmax(1)


def rounds_to_target(rule: RowOptimizer, replicas: int, limit: int) -> int | None:
    """Return after how many rounds of all replicas the loss is low enough; None if never."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    downpour = Downpour(model, rule)
    inputs, targets = samples(1, 2000)
    every = max(1, 16 // replicas)
    for index in range(limit):
        seeds = range(10 + index * replicas, 10 + (index + 1) * replicas)
        batches = [samples(seed, MINIBATCH) for seed in seeds]
        losses = train_step(downpour, index, batches, F.cross_entropy)
        if not all(map(math.isfinite, losses)):
            return None
        if index % every == every - 1:
            with torch.no_grad():
                if F.cross_entropy(model(inputs), targets) <= TARGET:
                    return index + 1
    return None


def downpour() -> Iterator[str]:
    """More replicas help Adagrad more than plain gradient descent (Dean et al., Fig. 4)."""
    yield f"rounds until the loss is {TARGET}, at the best of the rates {RATES}"
    for (name, form), replicas in itertools.product(FORMS.items(), REPLICAS):
        best, at = ROUNDS_MAX, 0.0
        for lr in RATES:
            found = rounds_to_target(form(lr), replicas, best)
            if found is not None:
                best, at = found, lr
        reached = f"{best} rounds at {at}" if at else f"not within {ROUNDS_MAX} rounds"
        yield f"{name}, {replicas} replicas: {reached}"


# ---------------------------------------------------------------- portions and replicas


def portions() -> Iterator[str]:
    """Many small portions of a batch suffer less from a slow worker than one for each."""
    for count in (4, 16, 64):
        flags = ("--no-rebalance", "--speculation-budget", "0") if count == 4 else ()
        x = run_job(count, 1.6 / count, 24, flags, "worker 2 always slow 3")
        step_s = statistics.median(x.step_s[12:])
        yield f"4 workers, one 3 times as slow, {count} portions: {step_s * 1e3:.0f} ms a step"


def replicas() -> Iterator[str]:
    """A lost replica of n costs 1/n of the throughput."""
    for workers in (4, 3):
        x = run_job(12, 0.1, 24, (), "", nproc=workers)
        step_s = statistics.median(x.step_s[8:])
        yield f"12 tasks of 100 ms on {workers} workers: {step_s * 1e3:.0f} ms a step"


# ---------------------------------------------------------------- replication, staleness


def aggregation() -> Iterator[str]:
    """Replicas get each row once for a step, however many tasks have used it."""
    rows, batch = 100_000, 512
    dice = torch.Generator().manual_seed(1)
    shares = 1 / torch.arange(1, rows + 1).double() ** 1.1
    drawn = [torch.multinomial(shares, batch, replacement=True, generator=dice) for _ in range(64)]
    for tasks in (1, 4, 16, 64):
        alone = sum(len(each.unique()) for each in drawn[:tasks])
        together = len(torch.cat(drawn[:tasks]).unique())
        share = f"{together / alone:.0%}"
        yield f"{tasks} tasks: {alone:,} rows pushed, {together:,} replicated ({share})"


def staleness() -> Iterator[str]:
    """The share of a step in which a worker waits for rows, by staleness (Li et al., Fig. 13)."""
    script = str(Path(__file__).with_name("staleness_worker.py"))
    found: dict[int, list[tuple[float, float]]] = {}
    for _, stale in itertools.product(range(5), (0, 1, 4, 16)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "holdfast.cli.main", "run", "--nproc", "2"]
            command += ["--servers", "2", "--virtual", "2", "--staleness", str(stale)]
            command += ["--run-dir", f"{folder}/run", script, f"{folder}/told.json"]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            told = json.loads(Path(folder, "told.json").read_text())
            found.setdefault(stale, []).append((told["wait_ms"], told["step_ms"]))
    for stale, pairs in found.items():
        wait, step = (statistics.median(each) for each in zip(*pairs, strict=True))
        yield f"staleness {stale}: waits {wait:.1f} of {step:.1f} ms, {wait / step:.0%}"


PARTS = {f.__name__: f for f in (downpour, portions, replicas, aggregation, staleness)}


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(PARTS)
    if unknown := [each for each in names if each not in PARTS]:
        sys.exit(f"no part is called {unknown[0]}: choose from {', '.join(PARTS)}")
    for name in names:
        print(f"{name}: {PARTS[name].__doc__}")
        for line in PARTS[name]():
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
