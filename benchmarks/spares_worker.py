"""The training script of benchmarks/spares.py: `TOLD WIDTH TASK_S`. `TOLD` gets the steps' ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from step_ends import tell_end
from torch import nn

import holdfast


def main() -> None:
    told, width, task_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    job = holdfast.join()
    model = nn.Linear(width, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, width)), batch_size=4)
    for step in job.steps(data, until=1_000_000):
        for (x,) in step:
            time.sleep(task_s)
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        tell_end(told, step.index, job.worker)


if __name__ == "__main__":
    main()
