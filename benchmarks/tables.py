"""Steps of a recommender alone: tables of a job next to torch's own, in one process, in turn.

Both are examples/recommender.py's model with the same ids. The twin's tables are
nn.EmbeddingBag(sparse=True), which torch.optim.Adagrad updates; a job of one worker and one virtual
rank trains the other, by servers.Adagrad. Blocks of steps alternate. Target: 1.3 times the twin's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from whole_batches import WholeBatches, as_is

import holdfast
from holdfast import tables as servers
from holdfast.engine.train.script.optimizer_watch import OptimizerWatch
from holdfast.engine.train.script.script_guard import UnprotectedModules

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from recommender import FEATURES, Recommender, clicks, look_up

DIM, STEPS, BLOCKS = 16, 5, 12


class Twin(nn.Module):
    """Has the same tables and model without Holdfast; `alike`: begin with these rows."""

    def __init__(self, alike: servers.EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        for name in FEATURES:
            weight = alike.embedding_bags[name].weight.detach().clone()
            self.tables.append(
                nn.EmbeddingBag(*weight.shape, mode="sum", sparse=True, _weight=weight)
            )
        self.model = Recommender(DIM)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(len(ids))
        rows = [table(ids[:, i], starts) for i, table in enumerate(self.tables)]
        return self.model(dense, torch.stack(rows, dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = holdfast.join(seed=3)
    # The twin is trained next to the job on purpose.
    UnprotectedModules.look = lambda self, protected: None  # type: ignore[method-assign]
    OptimizerWatch.check_step = lambda self, optimizer: None  # type: ignore[method-assign]
    configs = [
        servers.EmbeddingBagConfig(name=n, num_embeddings=options.rows, embedding_dim=DIM)
        for n in FEATURES
    ]
    tables = servers.EmbeddingBagCollection(configs, servers.Adagrad(lr=0.05))
    twin, model = Twin(tables), Recommender(DIM)
    dataset = WholeBatches(*clicks(40 * options.batch_size, options.rows, seed=1).tensors)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    twins = [
        torch.optim.Adam(twin.model.parameters(), lr=2e-3, foreach=False),
        torch.optim.Adagrad(twin.tables.parameters(), lr=0.05),
    ]
    job.protect(model=model, adam=adam, tables=tables)
    data = job.batches(dataset, options.batch_size, drop_last=True, collate_fn=as_is)

    def twin_block(first: int) -> float:
        began = time.perf_counter()
        for i in range(first, first + STEPS):
            at = i * options.batch_size % (len(dataset) - options.batch_size)
            dense, ids, clicked = dataset.__getitems__(list(range(at, at + options.batch_size)))
            F.binary_cross_entropy_with_logits(twin(dense, ids), clicked).backward()
            for each in twins:
                each.step()
                each.zero_grad()
        return (time.perf_counter() - began) / STEPS

    ratios, ours, theirs = [], [], []
    began = time.perf_counter()
    for step in job.steps(data, until=STEPS * (BLOCKS + 2)):
        for dense, ids, clicked in step:
            logits = model(dense, look_up(tables, ids))
            step.backward(F.binary_cross_entropy_with_logits(logits, clicked))
        adam.step()
        adam.zero_grad()
        if (step.index + 1) % STEPS == 0:
            spent = (time.perf_counter() - began) / STEPS
            other = twin_block(step.index)
            if step.index >= 2 * STEPS:
                ours, theirs = [*ours, spent], [*theirs, other]
                ratios.append(spent / other)
            began = time.perf_counter()
    middle = statistics.median
    rate = options.batch_size / middle(ours)
    print(
        f"{len(FEATURES)} tables of {options.rows:,} rows of {DIM}, batches of {options.batch_size}"
    )
    print(f"a job's step {1e3 * middle(ours):.1f} ms, torch's {1e3 * middle(theirs):.1f} ms")
    print(f"ratio by blocks {middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{rate:,.0f} samples a second on one core")


if __name__ == "__main__":
    main()
