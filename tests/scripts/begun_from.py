"""Begins from what a job of examples/fsdp.py has saved, and goes on for four steps.

    begun_from.py STORE

It prints the steps, a digest of model and optimizer, and the losses.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import fsdp

import holdfast


def whole(tensor: Any) -> bytes:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.contiguous().numpy().tobytes()


job = holdfast.join()
model = fsdp.Transformer()
if job.mesh.size() > 1:  # else it is as if it had never heard of it
    for block in model.blocks:
        fully_shard(block, mesh=job.mesh)
    fully_shard(model, mesh=job.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
job.protect(model=model, optimizer=optimizer)
steps = job.begin_from(sys.argv[1])
found = hashlib.sha256()
for p in model.parameters():
    found.update(whole(p.detach()) + whole(optimizer.state[p]["exp_avg"]))
if job.mesh.get_local_rank() == 0:
    print(f"{steps} steps", found.hexdigest(), flush=True)
for step in job.steps(job.batches(fsdp.sentences(), 8), until=steps + 4):
    for words, following in step:
        step.backward(model(words, following))
    optimizer.step()
    if job.is_leader:
        print("loss", step.loss, flush=True)
