"""Trains on a DataLoader with two processes; "torchdata" as the argument takes torchdata's.

The last line printed is the SHA-256 of the model.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

if sys.argv[1] == "torchdata":
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
else:
    from torch.utils.data import DataLoader


def jitter(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    rows = torch.stack([sample for (sample,) in samples])
    return rows + 0.01 * torch.randn(rows.shape)


job = holdfast.join()
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
loader = DataLoader(
    TensorDataset(torch.randn(50, 6)), 4, shuffle=True, num_workers=2, collate_fn=jitter
)
for epoch in job.epochs(job.batches(loader), until=3):
    for step in epoch:
        for rows in step:
            step.backward((model(rows) - rows.sin().sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
if job.is_leader:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(digest.hexdigest())
