"""Trains a small model that is divided over the processes of a worker in one of several ways.

    tensor_parallel.py STEPS columns|half|both|sampler|stream [--weighted]

columns: tensor parallelism; half: FSDP with mixed precision; both: of four processes, two hold the
columns and two are FSDP's; sampler, stream: FSDP on batches of a sampler, and of a stream.
--weighted: losses are sums with weights. The last line printed is the SHA-256 of the whole model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from fsdp import digest

import holdfast

steps, kind, weighted = int(sys.argv[1]), sys.argv[2], "--weighted" in sys.argv
job = holdfast.join()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 5))
columns = {
    "0": ColwiseParallel(output_layouts=Replicate()),
    "3": RowwiseParallel(input_layouts=Replicate()),
}
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if kind == "columns":
    parallelize_module(model, job.mesh, columns)
elif kind == "both":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "columns"))
    parallelize_module(model, mesh["columns"], columns)
    for part in model:
        fully_shard(part, mesh=mesh["data"])
else:
    fully_shard(model, mesh=job.mesh, mp_policy=half if kind == "half" else MixedPrecisionPolicy())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
inputs = torch.randn(240, 16, generator=torch.Generator().manual_seed(3))
labels = inputs[:, :5].argmax(1)
dataset = TensorDataset(inputs, labels)
if kind == "sampler":
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(240)], 200)
    data = job.batches(DataLoader(dataset, batch_sampler=BatchSampler(sampler, 6, drop_last=True)))
elif kind == "stream":
    pairs = [(inputs[i], labels[i]) for i in range(240)]
    data = job.stream(lambda shard, shards: pairs[shard::shards], 6)
elif kind == "both":
    data = job.batches(dataset, 6, split=mesh["data"])
else:
    data = job.batches(dataset, 6, split=kind == "half")
for step in job.steps(data, until=steps):
    for x, y in step:
        out = model(x).float()
        if weighted:
            step.backward(F.cross_entropy(out, y, reduction="sum"), weight=len(y))
        else:
            step.backward(F.cross_entropy(out, y))
    if kind not in ("columns", "both"):  # PyTorch clips no mixture of tensors on unlike meshes
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step.index % 5 == 0 and job.is_leader:
        print(f"step {step.index}: loss {step.loss:.6f}")
found = digest(model)
if job.is_leader:
    print(found, flush=True)
