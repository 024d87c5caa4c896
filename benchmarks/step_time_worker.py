"""One worker of benchmarks/step_time.py: DDP and Holdfast in turn, in the same process.

Both train the same model on the same batches with the same optimizer; blocks of steps alternate, so
that a drift of the machine's speed falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.sgd import sgd
from whole_batches import WholeBatches, as_is

import holdfast
from holdfast.engine.train.script.script_guard import UnprotectedModules

BATCH, WIDTH = 16, 512


def big() -> nn.Module:
    """Make an MLP of 5.8 million parameters in ten large tensors."""
    inner = [nn.Linear(1024, 1024), nn.ReLU()] * 4
    layers = [nn.Linear(WIDTH, 1024), nn.ReLU(), *inner, nn.Linear(1024, 1024), nn.Linear(1024, 10)]
    return nn.Sequential(
        *[
            nn.Linear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m
            for m in layers
        ]
    )


def transformer() -> nn.Module:
    """Make a six-layer encoder of 5.0 million parameters: large tensors and small ones."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Unflatten(1, (16, 32)),
        nn.Linear(32, 256),
        body,
        nn.Flatten(),
        nn.Linear(16 * 256, 64),
        nn.Linear(64, 10),
    )


def many_small() -> nn.Module:
    """Make 600 small tensors, which show the fixed cost per tensor."""
    return nn.Sequential(
        nn.Linear(WIDTH, 64), *[nn.Linear(64, 64) for _ in range(298)], nn.Linear(64, 10)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": big,
    "transformer": transformer,
    "many-small": many_small,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    job = holdfast.join()
    # DDP's twin is trained next to the job on purpose. (One look in 64 steps is not counted so.)
    UnprotectedModules.look = lambda self, protected: None  # type: ignore[method-assign]
    model, twin = MODELS[options.model](), MODELS[options.model]()
    twin.load_state_dict(model.state_dict())
    ours = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(4096, WIDTH), torch.randint(0, 10, (4096,))
    batches = WholeBatches(inputs, targets)
    job.protect(model=model, optimizer=ours)
    data = job.batches(batches, BATCH, collate_fn=as_is)

    def replicate() -> nn.Module:
        """Set DDP up, once the job has begun: before, Holdfast takes its use for a mistake."""
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(options.rendezvous, options.workers),
            rank=job.worker,
            world_size=options.workers,
            timeout=timedelta(minutes=5),
        )
        return nn.parallel.DistributedDataParallel(twin)

    def ddp_block(replica: nn.Module) -> float:
        began = time.perf_counter()
        for i in range(options.steps):
            at = (job.worker * options.steps + i) * BATCH % 4000
            x, y = batches.__getitems__(list(range(at, at + BATCH)))
            nn.functional.cross_entropy(replica(x), y).backward()
            update(twin)
        return (time.perf_counter() - began) / options.steps

    times: dict[str, list[float]] = {"ddp": [], "holdfast": []}
    began, replica = time.perf_counter(), None
    for step in job.steps(data, until=options.steps * (options.blocks + 2)):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        ours.step()
        ours.zero_grad()
        if (step.index + 1) % options.steps == 0:
            spent = (time.perf_counter() - began) / options.steps
            if step.index >= 2 * options.steps:
                times["holdfast"].append(spent)
            replica = replica or replicate()
            dist.barrier()
            spent = ddp_block(replica)
            if step.index >= 2 * options.steps:
                times["ddp"].append(spent)
            dist.barrier()
            began = time.perf_counter()
    if job.is_leader:
        params = sum(p.numel() for p in model.parameters())
        found = {"parameters": params, "tensors": len(list(model.parameters())), "times": times}
        options.out.write_text(json.dumps(found))
    dist.destroy_process_group()


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Update parameters as SGD does: Holdfast refuses optimizers of unprotected parameters."""
    params = list(model.parameters())
    grads = [p.grad for p in params if p.grad is not None]
    no_momentum: list[torch.Tensor | None] = [None] * len(params)
    sgd(
        params,
        grads,
        no_momentum,
        weight_decay=0.0,
        momentum=0.0,
        lr=1e-3,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    for p in params:
        p.grad = None


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
