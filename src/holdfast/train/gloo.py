"""The gloo transport: host tensors over TCP, severed by cutting the group's own sockets.

Every wait carries its own (long) timeout, because a timeout of the group itself would poison it;
nothing is ever detected here by waiting: peers' deaths close sockets, and the control plane severs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from holdfast.core.errors import Severed
from holdfast.train import sockets
from holdfast.train.transport import Message, Pending, Rendezvous

FOREVER = timedelta(days=365)
_DEVICE_LOCK = threading.Lock()


class GlooDevice:
    """The listening endpoint shared by all groups of this process."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._device: object | None = None
        self._port = 0

    def get(self) -> tuple[object, int]:
        """The gloo device and its port; made on first use."""
        with _DEVICE_LOCK:
            if self._device is None:
                old = sockets.socket_inodes()
                self._device = dist.ProcessGroupGloo.create_device(hostname=self._host)
                self._port = sockets.listening_port(sockets.socket_inodes().keys() - old.keys())
            return self._device, self._port


class _AddressStore(dist.Store):
    """Gloo's rendezvous on ours: each rank sets one address and reads every other's."""

    def __init__(self, rank: int, port: int, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rank = rank
        self._port = port
        self._rendezvous = rendezvous
        self._mine = b""
        self.ports = {port}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo sets bytes
        self._mine = bytes(value)
        self._rendezvous.publish(self._port.to_bytes(2, "big") + self._mine)

    def get(self, key: str) -> bytes:
        rank = int(key.rpartition("/")[2])
        if rank == self._rank:
            return self._mine
        address = self._rendezvous.lookup(rank)
        self.ports.add(int.from_bytes(address[:2], "big"))
        return address[2:]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


@dataclass(slots=True)
class _GlooPending:
    works: list[dist.Work]
    transport: GlooTransport

    def wait(self) -> None:
        for work in self.works:
            try:
                work.wait(FOREVER)
            except RuntimeError as error:
                raise Severed(f"gloo: {str(error).splitlines()[0]}") from None
        if self.transport.severed:
            raise Severed("the view was given up")


class GlooTransport:
    """One view's gloo group; see `Transport` for the contract."""

    ordered = False

    def __init__(self, device: GlooDevice, build_s: float = 30.0) -> None:
        self._device = device
        self._build_s = build_s
        self._group: dist.ProcessGroupGloo | None = None
        self._sockets: list = []
        self._lock = threading.Lock()
        self.severed = False

    def open(self, rank: int, size: int, rendezvous: Rendezvous) -> None:
        device, port = self._device.get()
        store = _AddressStore(rank, port, rendezvous)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=self._build_s)
        old = sockets.socket_inodes().keys()
        try:
            group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise Severed(f"gloo could not connect: {str(error).splitlines()[0]}") from None
        kept = sockets.keep_group_sockets(old, store.ports)
        with self._lock:
            self._group, self._sockets = group, kept
            if self.severed:
                sockets.cut(kept)
                raise Severed("the view was given up while its group was built")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        group = self._group
        if group is None or self.severed:
            raise Severed("the view was given up")
        works: list[dist.Work] = []
        try:
            for peer, tensor in receives:
                works.append(group.recv([tensor], peer, tag))  # type: ignore[attr-defined]
            for peer, tensor in sends:
                works.append(group.send([tensor], peer, tag))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise Severed(f"gloo: {str(error).splitlines()[0]}") from None
        return _GlooPending(works, self)

    def sever(self) -> None:
        with self._lock:
            self.severed = True
            sockets.cut(self._sockets)

    def close(self) -> None:
        self.sever()
        for each in self._sockets:
            each.close()
        self._sockets = []
        # Tearing a gloo group down can block for hundreds of milliseconds: off everyone's path.
        held = [self._group]
        self._group = None
        threading.Thread(target=held.clear, daemon=True).start()
