"""Trains by Downpour SGD; prints the loss and a digest of the model and the optimizer's state."""

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
from holdfast.tables import Adagrad

# The script has the same name as the recipe, so the recipe's folder comes first.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "recipes"))
from downpour import Downpour

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--task-s", type=float, default=0.0)
parser.add_argument("--n-fetch", type=int, default=4)
options = parser.parse_args()

job = holdfast.join(seed=3)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
downpour = Downpour(model, Adagrad(lr=0.05), n_push=2, n_fetch=options.n_fetch, warm_start=2)
job.protect(model=model, downpour=downpour)

dice = torch.Generator().manual_seed(5)
inputs = torch.randn(4000, 6, generator=dice)
targets = inputs[:, :2].prod(1, keepdim=True).sin()
data = job.batches(TensorDataset(inputs, targets), 2 * 16)
for step in job.steps(data, until=options.steps):
    for batch in step:
        for given, wanted in downpour.minibatches(step, batch):
            downpour.backward(nn.functional.mse_loss(downpour(given), wanted))
        time.sleep(options.task_s)
    downpour.step(step)

if job.is_leader:
    model.eval()
    with torch.no_grad():
        print(f"loss {nn.functional.mse_loss(model(inputs), targets).item():.6f}")
    digest = hashlib.sha256()
    kept = [slot for state in downpour.state.values() for slot in state.values()]
    for value in [*model.state_dict().values(), *kept]:
        digest.update(value.numpy().tobytes())
    print(digest.hexdigest())
