"""The training script of benchmarks/gpu_evidence.py: the GPT of lab/demo/gpt.py on one device.

It runs as a worker of a Holdfast job, as a process of DistributedDataParallel on gloo, or alone.
Everything is deterministic. Each step adds a line to the file `--told`: step, process, monotonic
seconds. The last line of the output is the digest of the whole training state.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins

import torch
import torch.distributed as dist
from ddp_member import endless_batches, join_group
from step_ends import tell_end
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import holdfast
from holdfast.lab.demo.gpt import GPT, digest, standard_library


def make_deterministic() -> None:
    """Make torch use kernels that give the same bits each time, compiled ones included."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False


def compile_model(model: nn.Module) -> None:
    """Compile a model so that every process chooses the same kernels for it."""
    import torch._dynamo
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True  # no kernel is chosen by how long it takes
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    model.compile(dynamic=False)


class Trainer:
    """Makes the parts that every library trains, on the device that the options name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self._told: Path | None = options.told

    def model(self, mesh: Any = None) -> GPT:
        """Make the model, with the same values on every device; sharded over `mesh`, if given."""
        options = self.options
        torch.manual_seed(0)
        model = GPT(options.width, options.layers, options.context).to(self.device)
        if mesh is not None:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if options.compile:
            compile_model(model)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def data(self) -> torch.utils.data.Dataset:
        return standard_library(self.options.context, self.options.bytes)

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = (each.to(self.device, non_blocking=True) for each in (x, y))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.autocast):
            logits = model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def tell(self, step: int, process: int) -> None:
        """Write that a step has ended."""
        if self._told is not None:
            tell_end(self._told, step, process)


def with_holdfast(trainer: Trainer) -> str:
    options = trainer.options
    job = holdfast.join()
    model = trainer.model(job.mesh if options.sharded else None)
    optimizer = trainer.optimizer(model)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(trainer.data(), options.batch_size)
    for step in job.steps(data, until=options.steps):
        for x, y in step:
            step.backward(trainer.loss(model, x, y))
        trainer.update(model, optimizer)
        trainer.tell(step.index, job.worker)
    if options.sharded:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = digest(get_model_state_dict(model, options=whole))
    else:
        found = digest([model.state_dict(), optimizer.state_dict()])
    return found if job.is_leader else ""


def without_holdfast(trainer: Trainer) -> str:
    """Train with DDP on gloo, or alone where there is one process."""
    rank, world = join_group()
    model = trained = trainer.model()
    if world > 1:
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = trainer.optimizer(model)
    batches = endless_batches(trainer.data(), trainer.options.batch_size, rank, world)
    for step, (x, y) in zip(range(trainer.options.steps), batches, strict=False):
        loss = trainer.loss(trained, x, y)
        loss.backward()
        loss.item()  # Holdfast reads it too
        trainer.update(model, optimizer)
        trainer.tell(step, rank)
    if world > 1:
        dist.barrier()
    return digest([model.state_dict(), optimizer.state_dict()]) if rank == 0 else ""


LIBRARIES: dict[str, Callable[[Trainer], str]] = {
    "holdfast": with_holdfast,
    "ddp": without_holdfast,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=LIBRARIES, default="holdfast")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=2_000_000, help="of text to train on")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--sharded", action="store_true", help="with fully_shard")
    parser.add_argument("--told", type=Path)
    options = parser.parse_args()
    make_deterministic()
    if found := LIBRARIES[options.library](Trainer(options)):
        print(found, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
