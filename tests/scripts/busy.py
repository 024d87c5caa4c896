"""A worker that is legitimately busy: argument 1 says how, argument 2 for how many seconds."""

from __future__ import annotations

import ctypes
import sys
import time

import torch
from torch import nn

import holdfast


def be_busy(how: str, seconds: float) -> None:
    match how:
        case "gil":  # a C call that neither runs nor lets go of the interpreter lock
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        case "compute":
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                pass
        case _:  # waiting for something outside
            time.sleep(seconds)


def main() -> None:
    how, seconds = sys.argv[1], float(sys.argv[2])
    if how == "before":
        time.sleep(seconds)
    job = holdfast.join()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=2)
    for step in job.steps(data, until=6):
        for (x,) in step:
            if step.index == 0 and how == "first" and job.worker == 1:
                be_busy(how, seconds)
            if step.index == 2 and how in ("gil", "compute", "wait") and job.worker == 1:
                be_busy(how, seconds)
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step.index == 3 and how == "evaluate" and job.worker == 1:
            be_busy(how, seconds)
    if job.is_leader:
        print("done", flush=True)


if __name__ == "__main__":
    main()
