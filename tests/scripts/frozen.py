"""Trains a sparse table and a layer, which is frozen from step 2 on; both with momentum.

With a store as its argument it waits for a checkpoint after step 6. The last line printed is the
SHA-256 of the model.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage

STEPS, FROZEN_AT, ROWS, SAVED_AT, WAIT_S = 16, 1, 50, 4, 60.0


def wait_until_saved(store: Path) -> None:
    """Wait for the checkpoint of step SAVED_AT."""
    deadline = time.monotonic() + WAIT_S
    while SAVED_AT not in Checkpoints(FileStorage(store)).steps():
        assert time.monotonic() < deadline, "the checkpoint does not come"
        time.sleep(0.01)


job = holdfast.join()
table, layer = nn.Embedding(ROWS, 4, sparse=True), nn.Linear(4, 1)
model = nn.Sequential(table, layer)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
job.protect(model=model, optimizer=optimizer)
for step in job.steps(until=STEPS):
    for _ in step:
        step.backward(model(torch.randint(0, ROWS, (8,))).square().mean())
    optimizer.step()
    if step.index == SAVED_AT + 2 and len(sys.argv) > 1:
        wait_until_saved(Path(sys.argv[1]))
    if step.index == FROZEN_AT:
        layer.requires_grad_(False)
if job.is_leader:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    sys.stdout.write(digest.hexdigest() + "\n")
