"""Keeps a DDP script from hanging at its end, after it has destroyed its process group.

DistributedDataParallel may be the last to let go of a group, when the script's function returns. It
then waits for gloo's thread with the interpreter lock held, while that thread waits for the lock to
drop a tensor: https://github.com/pytorch/pytorch/issues/56297. It happens under torchrun as well.
Python's own reference to the group gives the lock back while it waits, so this module holds one.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed import distributed_c10d


def keep_last() -> None:
    """Keep the group that the script destroys last until it destroys another one, or ends."""
    destroy = dist.destroy_process_group
    kept: list[dist.ProcessGroup | None] = []

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        kept[:] = [dist.group.WORLD, group]
        destroy(group)

    for module in (dist, distributed_c10d):
        setattr(module, destroy.__name__, destroy_process_group)
