"""Trains by L-BFGS over all samples; prints the loss and a digest of the model."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "recipes"))
from lbfgs import LBFGS

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--task-s", type=float, default=0.0)
options = parser.parse_args()

job = holdfast.join(seed=3)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = LBFGS(model.parameters(), history_size=5)
job.protect(model=model, optimizer=optimizer)

dice = torch.Generator().manual_seed(5)
inputs = torch.randn(160, 6, generator=dice)
targets = inputs[:, :2].prod(1, keepdim=True).sin()
data = job.batches(TensorDataset(inputs, targets), 160 // job.virtual_ranks)
first = last = 0.0
for step in job.steps(data, until=options.steps):
    for given, wanted in step:
        step.backward(nn.functional.mse_loss(model(given), wanted))
        time.sleep(options.task_s)
    optimizer.step(step.loss)
    optimizer.zero_grad()
optimizer.settle()

if job.is_leader:
    with torch.no_grad():
        print(f"loss {nn.functional.mse_loss(model(inputs), targets).item():.6f}")
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(digest.hexdigest())
