"""The training script of benchmarks/joining.py: a state of a known size, one line per step.

Each line: STEP worker step monotonic-seconds tasks. A task sleeps, as a GPU would compute without
the processor; its gradient is dense, and Adam keeps two more values for each parameter.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import holdfast

TASK_S = 0.05


class Large(nn.Module):
    """Has one parameter of `nbytes` bytes; a task uses a little of it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes // 4 // 1024, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[: x.shape[1]]


def main() -> None:
    state_mb, until = int(sys.argv[1]), int(sys.argv[2])
    job = holdfast.join()
    model = Large(state_mb * 1_000_000 // 3)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.randn(4096, 64)), batch_size=8)
    for step in job.steps(data, until=until):
        tasks = 0
        for (x,) in step:
            tasks += 1
            time.sleep(TASK_S)
            step.backward((model(x) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        print("STEP", job.worker, step.index, time.monotonic(), tasks, flush=True)


if __name__ == "__main__":
    main()
