"""Trains for epochs, written in two ways: as loops in sequence, or by job.epochs.

Prints each step, and at the end a digest of the model and of the kept values.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import holdfast

EPOCHS = 20
STEP_S = 0.01

job = holdfast.join()
inputs = torch.randn(300, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :2].sin())
data = job.batches(dataset, batch_size=4)
job.values["scores"] = []


def loops() -> Iterator[tuple[int, Any]]:
    for number in range(EPOCHS):
        yield number, job.steps(data, until=(number + 1) * data.steps_per_epoch)


def epochs() -> Iterator[tuple[int, Any]]:
    for each in job.epochs(data, until=EPOCHS):
        yield each.index, each


for epoch, steps in loops() if sys.argv[1] == "loops" else epochs():
    for step in steps:
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        print("STEP", job.worker, epoch, step.index, flush=True)
        time.sleep(STEP_S)  # so that a worker that was killed comes back before the end
    score = job.evaluate(lambda batch: model(batch[0]).square().mean(), dataset, 50)
    job.values["scores"] = [*job.values["scores"][:epoch], score]

found = hashlib.sha256(repr(job.values["scores"]).encode())
for tensor in model.state_dict().values():
    found.update(tensor.numpy().tobytes())
print(found.hexdigest(), flush=True)
