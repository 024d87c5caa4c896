"""Layers with dropout that are computed again in the backward pass, as activation checkpoints are.

The argument is use_reentrant: True, False, or "none" to keep all activations. The last line printed
is the SHA-256 of the model.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast

STEPS = 8


def layer(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, 6))


class Net(nn.Module):
    """Computes its layers in checkpoints that draw their own dropout."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(layer(width) for width in (16, 24, 8))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            if self.reentrant is None:
                x = x + each(x)
            else:
                x = x + checkpoint(each, x, use_reentrant=self.reentrant)
        return self.head(nn.functional.dropout(x, 0.1, self.training))


job = holdfast.join()
model = Net({"none": None, "True": True, "False": False}[sys.argv[1]])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
for step in job.steps(until=STEPS):
    for _ in step:
        inputs = torch.randn(4, 6, requires_grad=True)
        step.backward((model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if job.is_leader:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(digest.hexdigest())
