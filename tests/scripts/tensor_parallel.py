"""Trains a model whose linear layers are cut over the processes of a worker (tensor parallelism).

    tensor_parallel.py STEPS [--bf16] [--weighted]

--bf16: FSDP with mixed precision instead; --weighted: losses are sums with weights. The last line
printed is the SHA-256 of the whole model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from fsdp import digest

import holdfast

job = holdfast.join()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 5))
cut = "--bf16" in sys.argv
if cut:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=job.mesh, mp_policy=half)
else:
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    plan["3"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, job.mesh, plan)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
inputs = torch.randn(240, 16, generator=torch.Generator().manual_seed(3))
dataset = TensorDataset(inputs, inputs[:, :5].argmax(1))
for step in job.steps(job.batches(dataset, 6, split=cut), until=int(sys.argv[1])):
    for x, y in step:
        out = model(x).float()
        if "--weighted" in sys.argv:
            step.backward(F.cross_entropy(out, y, reduction="sum"), weight=len(y))
        else:
            step.backward(F.cross_entropy(out, y))
    if cut:  # PyTorch clips no mixture of distributed and other parameters
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step.index % 5 == 0 and job.is_leader:
        print(f"step {step.index}: loss {step.loss:.6f}")
found = digest(model)
if job.is_leader:
    print(found, flush=True)
