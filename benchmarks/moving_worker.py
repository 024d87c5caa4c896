"""Trains for benchmarks/moving.py; its arguments are `TOLD`, `TASK_S` and `STEPS`.

The leader writes the steps' ends into `TOLD`, and stops the job once the file `TOLD` with the
suffix .stop is there. Each worker prints the last step and the digest of the weights.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from step_ends import tell_end
from torch import nn

import holdfast
from holdfast.lab.demo.gpt import digest


def main() -> None:
    told, task_s, until = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    job = holdfast.join()
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 1000)), batch_size=4)
    last = 0
    for step in job.steps(data, until=until):
        for (x,) in step:
            time.sleep(task_s)
            step.backward((model(x) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        last = step.index
        if job.is_leader:
            tell_end(told, step.index, job.worker)
            if told.with_suffix(".stop").exists():
                job.stop()
    print("END", last, digest(model.state_dict()), flush=True)


if __name__ == "__main__":
    main()
