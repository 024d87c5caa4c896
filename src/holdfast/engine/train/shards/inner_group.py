"""Lets the processes of one worker work on one model: torch.distributed's group, and a mesh.

They live and die together, so that no code here has to handle the loss of one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.engine.core.errors import UserError

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # asks for the address of an interface
DIMENSION = "shard"  # name of the mesh's only dimension
NEVER = timedelta(days=365)  # the machine and the agent deal with a process that hangs


class InnerGroup:
    """Makes this process number `shard` of the `size` processes of one model.

    `store`: shared by all of them. `host`: the address of this machine by which the other processes
    reach it.
    """

    def __init__(self, shard: int, size: int, store: dist.Store, host: str = LOOPBACK) -> None:
        self.shard = shard
        self.size = size
        self._store = store
        self._host = host
        self._mesh: DeviceMesh | None = None
        if dist.is_initialized():
            raise UserError(
                "torch.distributed is initialised already: leave out init_process_group(), as "
                "holdfast.join() makes the group of a worker's processes"
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with _use_interface(host):
            dist.init_process_group(
                backend, store=store, rank=shard, world_size=size, timeout=NEVER
            )
            self._group = dist.new_group(backend="gloo", timeout=NEVER)  # sums numbers on the host
        store.set_timeout(NEVER)  # all processes are here: from now on they wait for each other

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of all processes of this worker: one dimension, "shard"."""
        if self._mesh is None:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            with _use_interface(self._host):
                self._mesh = init_device_mesh(kind, (self.size,), mesh_dim_names=(DIMENSION,))
        return self._mesh

    def means(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all processes of each of these numbers, the same on all of them."""
        rows = self._gather_all(torch.tensor(values, dtype=torch.float64))
        total = rows[0]
        for row in rows[1:]:  # always in this order
            total = total + row
        return (total / self.size).tolist()

    def join_digests(self, digests: Sequence[int]) -> list[int]:
        """Return one digest of 63 bits for each place of all processes' lists; 0 if all are 0."""
        rows = self._gather_all(torch.tensor(digests, dtype=torch.int64))
        columns = torch.stack(rows, dim=1).numpy()
        return [xxhash.xxh3_64_intdigest(c.tobytes()) >> 1 if c.any() else 0 for c in columns]

    def is_set_anywhere(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return any(bool(row) for row in self._gather_all(torch.tensor([int(flag)])))

    def exchange_texts(self, topic: str, text: str) -> dict[int, str]:
        """Send a text to all processes, once for each topic; returns each one's text, by shard."""
        self._store.set(f"{topic}/{self.shard}", text)
        every = range(self.size)
        return {shard: self._store.get(f"{topic}/{shard}").decode() for shard in every}

    def take_from_first(self, data: bytes) -> bytes:
        """Return the data from the process of shard 0."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self._group)
        room = torch.empty(int(size), dtype=torch.uint8)
        if self.shard == 0 and data:
            room = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(room, 0, group=self._group)
        return room.numpy().tobytes()

    def _gather_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        return rows


@contextlib.contextmanager
def _use_interface(host: str) -> Iterator[None]:
    """Make gloo and NCCL connect by the network interface that has this address."""
    device = interface_of(host)
    libraries = ("GLOO",) if host == LOOPBACK else ("GLOO", "NCCL")
    names = [f"{library}_SOCKET_IFNAME" for library in libraries] if device else []
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, device))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def interface_of(host: str) -> str:
    """Return the name of the network interface that has a host's IPv4 address; empty if none."""
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
