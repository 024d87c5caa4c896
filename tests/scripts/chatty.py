"""Trains for a number of steps, and prints a number of bytes in each: chatty.py BYTES STEPS."""

from __future__ import annotations

import sys

import torch
from torch import nn

import holdfast

job = holdfast.join()
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.protect(model=model, optimizer=optimizer)
dataset = torch.utils.data.TensorDataset(torch.ones(64, 2))
for step in job.steps(job.batches(dataset, batch_size=2), until=int(sys.argv[2])):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(int(sys.argv[1]) // 1000):
        print(f"step {step.index} ".ljust(999, "x"))
    print(f"error {step.index}", file=sys.stderr)
print("the end", flush=True)
