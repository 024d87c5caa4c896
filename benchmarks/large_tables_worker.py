"""Trains one large table for benchmarks/large_tables.py; its arguments: `TOLD ROWS DIM`.

The leader writes the steps' ends into `TOLD`, and stops the job once the file `TOLD` with the
suffix .stop is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from step_ends import tell_end
from torch import nn

import holdfast
from holdfast import tables as servers

SAMPLES, BAG, BATCH = 20_000, 8, 256


def main() -> None:
    told, rows, dim = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    job = holdfast.join(seed=3)
    config = servers.EmbeddingBagConfig(name="items", num_embeddings=rows, embedding_dim=dim)
    tables = servers.EmbeddingBagCollection([config], servers.RowWiseAdagrad(lr=0.05))
    model = nn.Linear(dim, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer, tables=tables)
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(0, rows, (SAMPLES, BAG), generator=dice)
    data = job.batches(torch.utils.data.TensorDataset(ids, torch.rand(SAMPLES)), BATCH)
    for step in job.steps(data, until=1_000_000):
        for bags, targets in step:
            found = tables({"items": (bags.flatten(), torch.arange(0, bags.numel(), BAG))})
            step.backward((model(found["items"]).squeeze(1) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if job.is_leader:
            tell_end(told, step.index, job.worker)
            if told.with_suffix(".stop").exists():
                job.stop()


if __name__ == "__main__":
    main()
