"""The training script of benchmarks/recovery.py: known work per task, one line per step and worker.

Each line: STEP worker step monotonic-seconds tasks. A task sleeps for TASK_S, so the work that a
failure makes a survivor do again is known exactly.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import holdfast

TASK_S = 0.05


def main() -> None:
    job = holdfast.join()
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.randn(4096, 256)), batch_size=8)
    for step in job.steps(data, until=int(sys.argv[1])):
        tasks = 0
        for (x,) in step:
            tasks += 1
            time.sleep(TASK_S)
            step.backward((model(x) - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        print("STEP", job.worker, step.index, time.monotonic(), tasks, flush=True)


if __name__ == "__main__":
    main()
