"""The training script of `make bench-peers` for torchrun: DDP with checkpoints.

It follows PyTorch's tutorial on fault-tolerant training with torchrun: after a failure all
processes start again and load the newest checkpoint. The loader's state comes from torchdata.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import peers_task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def common_attempt() -> int:
    """Return a number that all processes share, and that is greater in each later group."""
    now = torch.tensor([int(time.monotonic() * 1e3)])
    dist.broadcast(now, 0)
    return int(now)


def make_loader(steps: int, rank: int) -> Any:
    """Return a rank's loader, whose state counts the samples that it has read."""
    data = peers_task.make_data(steps)
    sampler = StatefulDistributedSampler(
        data, peers_task.WORKERS, rank, shuffle=True, seed=peers_task.SEED
    )
    return StatefulDataLoader(data, peers_task.BATCH, sampler=sampler)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    first: int,
    save: Callable[[int], None],
) -> None:
    """Train `model`, wrapped for DDP, from step `first` on; `save` after each step."""
    records = peers_task.Records(dist.get_rank(), common_attempt())
    step = first
    for step, (samples, values) in enumerate(batches, first):
        records.begin(step, samples)
        optimizer.zero_grad()
        peers_task.paced_loss(model, values).backward()
        optimizer.step()
        records.commit(step)
        save(step + 1)
    records.end(step + 1, model)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=peers_task.COLLECTIVE_S))
    model, optimizer = peers_task.make_model()
    loader = make_loader(peers_task.step_count(), dist.get_rank())
    path, first = peers_task.folder() / "checkpoint.pt", 0
    if path.exists():
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        loader.load_state_dict(found["loader"])
        first = found["step"]
    wrapped = DistributedDataParallel(model)

    def save(step: int) -> None:
        if step % peers_task.CHECKPOINT_STEPS == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"loader": loader.state_dict(), "step": step}
            peers_task.save_whole(state, path)

    train(wrapped, optimizer, iter(loader), first, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
