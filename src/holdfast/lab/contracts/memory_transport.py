"""Implements `Transport` between threads of one process: the fake that every test may use.

It is stricter than a network. A tensor that is touched before the wait returns is noticed, and what
arrives is seen only in the wait. Members can die, be unplugged, and have a message damaged.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.train.exchange.seam import Message, Pending, Rendezvous, Waits

DAMAGED_NUMEL = 100  # the least number of elements of a message that is damaged on request
Box = collections.deque[tuple[torch.Tensor, int]]  # messages, and the times that they carry


@dataclass(slots=True)
class _Group:
    """Keeps the shared state of one group's members; the network's condition guards it."""

    aborted: bool = False
    #: Ranks that closed the group, or died.
    gone: set[int] = field(default_factory=set)
    unplugged: set[int] = field(default_factory=set)
    boxes: dict[tuple[int, int, int], Box] = field(
        default_factory=lambda: collections.defaultdict(collections.deque)
    )  # by sender, receiver and tag


class MemoryNetwork:
    """Connects the transports of one process, which it makes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._groups: dict[tuple[bytes, ...], _Group] = {}

    def transport(self) -> MemoryTransport:
        """Make a transport, still without a group."""
        with self.changed:
            return MemoryTransport(self, b"%d" % next(self._numbers))

    def group(self, addresses: tuple[bytes, ...]) -> _Group:
        """Return the record that the transports with these addresses, by rank, share."""
        with self.changed:
            return self._groups.setdefault(addresses, _Group())


class MemoryTransport:
    """Implements `Transport` in memory. A member's thread that dies calls `close`."""

    ordered = False

    def __init__(self, network: MemoryNetwork, address: bytes) -> None:
        self.damages_next = False  # a bit of the next large message sent
        self._network = network
        self._address = address
        self._group = _Group()
        self._rank = -1
        self._size = 0

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        rendezvous.publish(self._address)
        addresses = tuple(
            self._address if peer == rank else rendezvous.lookup(peer) for peer in range(size)
        )
        with self._network.changed:
            before, self._group = self._group, self._network.group(addresses)
            self._rank, self._size = rank, size
            self._group.aborted |= before.aborted
        self.check()

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        group, rank = self._group, self._rank
        with self._network.changed:
            self.check()
            copies = [tensor.clone() for _, tensor in sends]
            for (peer, _), copy in zip(sends, copies, strict=True):
                if not {peer, rank} & group.unplugged:
                    group.boxes[rank, peer, tag].append((self._carry(copy), sent_us))
            self._network.changed.notify_all()
        return _PendingInMemory(self, list(sends), copies, list(receives), tag)

    def receive(self, peer: int, tag: int) -> tuple[torch.Tensor, int]:
        """Wait for a message, and return it with the time that it carries. Raises Aborted."""
        box = self._group.boxes[peer, self._rank, tag]
        with self._network.changed:
            while not box:
                self.check(peer)
                self._network.changed.wait()
            self.check()
            return box.popleft()

    def has_all(self, peers: Iterable[int], tag: int) -> bool:
        """Return whether a message of each of these has come, or none can come any more."""
        group = self._group
        with self._network.changed:
            if group.aborted or group.gone:
                return True
            wanted = collections.Counter(peers)
            return all(len(group.boxes[p, self._rank, tag]) >= n for p, n in wanted.items())

    def listen(
        self, tag: int, size: int, hear: Callable[[int, bytes], None], *, always: bool = False
    ) -> None:
        def work() -> None:
            while (found := self._receive_any(tag)) is not None:
                hear(*found)

        threading.Thread(target=work, daemon=True).start()

    def _receive_any(self, tag: int) -> tuple[int, bytes] | None:
        """Wait for a message of any member; None at the end of the group."""
        group, changed = self._group, self._network.changed
        with changed:
            while not group.aborted and self._rank not in group.gone:
                for peer in range(self._size):
                    if box := group.boxes[peer, self._rank, tag]:
                        return peer, box.popleft()[0].numpy().tobytes()
                changed.wait()
        return None

    def go_on(self) -> None:
        return

    def lost_ranks(self) -> Sequence[int]:
        with self._network.changed:
            group, everyone = self._group, range(self._size)
            if group.gone:
                self.abort()
            cut_off = everyone if self._rank in group.unplugged else sorted(group.unplugged)
            return [peer for peer in cut_off if peer != self._rank]

    def abort(self) -> None:
        with self._network.changed:
            self._group.aborted = True
            self._network.changed.notify_all()

    def close(self) -> None:
        """End the connections, as a death does: earlier messages can still be received."""
        with self._network.changed:
            self._group.gone.add(self._rank)
            self._network.changed.notify_all()

    def unplug(self) -> None:
        """Lose every message from now on, in both directions, without an error."""
        with self._network.changed:
            self._group.unplugged.add(self._rank)

    def check(self, peer: int = -1) -> None:
        """Raise Aborted if the group was given up, or this peer has died."""
        if self._group.aborted or {peer, self._rank} & self._group.gone:
            raise Aborted("the group was given up, or a member of it has died")

    def _carry(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.damages_next or tensor.numel() < DAMAGED_NUMEL:
            return tensor
        self.damages_next = False
        damaged = tensor.clone()
        damaged.view(-1).view(torch.uint8)[7] ^= 1
        return damaged


class _PendingInMemory:
    """Represents one exchange that has been started."""

    def __init__(
        self,
        transport: MemoryTransport,
        sends: list[Message],
        copies: list[torch.Tensor],
        receives: list[Message],
        tag: int,
    ) -> None:
        self._transport = transport
        self._sends = sends
        self._copies = copies
        self._receives = receives
        self._tag = tag

    def is_done(self) -> bool:
        return self._transport.has_all((peer for peer, _ in self._receives), self._tag)

    def wait(self, waits: Waits | None = None) -> None:
        self._transport.check()
        for peer, tensor in self._receives:
            body, sent_us = self._transport.receive(peer, self._tag)
            tensor.copy_(body)
            if waits is not None:
                waits.record_arrival(peer, sent_us)
        self._receives = []
        for (peer, tensor), copy in zip(self._sends, self._copies, strict=True):
            ours, sent = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, copy))
            same = torch.equal(ours, sent)
            # A group that was given up in the meantime has no claim to its tensors.
            if not same:
                self._transport.check()
            assert same, f"what rank {peer} is sent was touched before the wait"
        self._sends, self._copies = [], []
