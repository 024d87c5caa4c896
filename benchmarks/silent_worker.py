"""The training script of benchmarks/silent.py: STEPS TASK_S OUT FORGIVEN.

FORGIVEN: the number of mistakes for which a worker is forgiven, unless it repeats one at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast.engine.core.step import rulings
from holdfast.lab.demo.gpt import digest


def main() -> None:
    steps, task_s, out = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    rulings.MISTAKES_MAX = int(sys.argv[4])
    job = holdfast.join()
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.randn(4096, 64)), batch_size=4)
    for step in job.steps(data, until=steps):
        for (x,) in step:
            time.sleep(task_s)
            step.backward((model(x) - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if job.is_leader:
        out.write_text(digest(model.state_dict()))


if __name__ == "__main__":
    main()
