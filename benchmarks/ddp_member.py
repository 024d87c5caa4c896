"""What a process of DistributedDataParallel needs that ddp_launch.py has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MEET = timedelta(minutes=5)


def join_group() -> tuple[int, int]:
    """Form a gloo group, unless this process is alone; return its rank and the size."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        store = dist.FileStore(os.environ["MEETING"], world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=MEET)
    return rank, world


def endless_batches(
    data: Any, batch: int, rank: int, world: int, collate_fn: Callable[[Any], Any] | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a rank's batches, epoch after epoch, as users of DDP load them."""
    sampler: torch.utils.data.DistributedSampler = torch.utils.data.DistributedSampler(
        data, world, rank, drop_last=True
    )
    loader = torch.utils.data.DataLoader(
        data, batch, sampler=sampler, drop_last=True, collate_fn=collate_fn
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
