"""Handles torch.distributed's own groups, by which the processes of a script or a worker meet.

By itself torch's store would listen on all addresses of the machine. The store asks for no proof,
so it listens only on the given address.

DistributedDataParallel may be the last to let go of a group, when the script's function returns. It
then waits for gloo's thread with the interpreter lock held, while that thread waits for the lock to
drop a tensor: https://github.com/pytorch/pytorch/issues/56297. It happens under torchrun as well.
Python's own reference to the group gives the lock back while it waits, so this module holds one.
"""

from __future__ import annotations

import functools
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d

from holdfast.engine.net.peer_listener import open_listener

MEET_S = 300.0  # for all processes of a group to come


def open_store(host: str) -> TCPStore:
    """Serve an empty store at a free port of `host`, an address of this machine. OSError."""
    listener, _ = open_listener(host)
    address, port = listener.getsockname()[:2]  # a name could have other addresses as well
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def find_store(host: str, port: int) -> TCPStore:
    """Connect to a store that another process has opened."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=MEET_S))


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
