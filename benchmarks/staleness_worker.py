"""The training script of benchmarks/table_papers.py's staleness: staleness_worker.py OUT.

It trains examples/recommender.py's model, and the leader writes the median milliseconds of a step,
and those in which it waited for rows of its tables.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from whole_batches import WholeBatches, as_is

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from recommender import Recommender, clicks, look_up, make_tables

ROWS, DIM, BATCH, STEPS, WARM = 100_000, 16, 512, 80, 30


def main() -> None:
    job = holdfast.join(seed=3)
    model, tables = Recommender(DIM), make_tables(ROWS, DIM)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    job.protect(model=model, adam=adam, tables=tables)
    dataset = WholeBatches(*clicks((STEPS + 2) * job.virtual_ranks * BATCH, ROWS, seed=1).tensors)
    data = job.batches(dataset, BATCH, drop_last=True, collate_fn=as_is)
    waits, steps, last = [], [], time.perf_counter()
    for step in job.steps(data, until=STEPS):
        waited = 0.0
        for dense, ids, clicked in step:
            began = time.perf_counter()
            rows = look_up(tables, ids)
            waited += time.perf_counter() - began
            step.backward(F.binary_cross_entropy_with_logits(model(dense, rows), clicked))
        adam.step()
        adam.zero_grad()
        now = time.perf_counter()
        waits.append(waited)
        steps.append(now - last)
        last = now
    if job.is_leader:
        told = {"wait_ms": waits, "step_ms": steps}
        medians = {name: 1e3 * statistics.median(each[WARM:]) for name, each in told.items()}
        Path(sys.argv[1]).write_text(json.dumps(medians))


if __name__ == "__main__":
    main()
