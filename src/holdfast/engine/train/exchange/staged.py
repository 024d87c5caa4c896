"""Carries device tensors over a transport for host tensors, by way of pinned host memory.

It serves workers that NCCL cannot connect, above all those that share one GPU. A tensor is copied
to the host before the host's transport sends it. A received tensor is copied to the GPU in a stream
of its own: the GPU waits for these copies, the host does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from holdfast.engine.core.errors import Aborted, first_line
from holdfast.engine.train.exchange.seam import Message, Pending, Rendezvous, Transport
from holdfast.engine.train.exchange.waits import Waits

POOL_BYTES_MAX = 1 << 30  # the largest size of all rooms that wait to be used again
LEAST_BYTES = 1 << 12
LARGE_BYTES = 1 << 26  # rooms are a power of two in size, and above this a multiple of it
Copy = tuple[torch.Tensor, torch.Tensor]  # to, from


class Moment(Protocol):
    """Marks a place in the work that is queued on a device, as torch.cuda.Event does."""

    def query(self) -> bool:
        """Return whether the device has come so far."""
        ...


class DeviceCopies:
    """Copies between one GPU and the host, in a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def record_event(self) -> Moment:
        """Record an event after the work that is queued on the computing stream by now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_host(self, copies: Sequence[Copy], after: Moment) -> None:
        """Copy to the host, once the device has passed `after`; return when all has arrived."""
        self._copy(copies, after).synchronize()

    def to_device(self, copies: Sequence[Copy], after: Moment) -> Moment:
        """Queue copies to the device; later computing waits for them.

        The host's tensors must not change until the returned moment.
        """
        event = self._copy(copies, after)
        torch.cuda.current_stream(self._device).wait_event(event)
        return event

    def room(self, size: int) -> torch.Tensor:
        """Return `size` bytes of pinned memory, or of ordinary memory where none can be pinned."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # slower: the driver copies by way of pinned memory of its own
            return torch.empty(size, dtype=torch.uint8)

    def _copy(self, copies: Sequence[Copy], after: Moment) -> torch.cuda.Event:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_event(after)  # type: ignore[arg-type]  # an event of `record_event`
        with torch.cuda.stream(self._stream):
            for to, from_ in copies:
                to.copy_(from_, non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._stream)
        return done


class HostRooms:
    """Keeps host memory for messages under way; pinning it takes longer than sending them.

    A worker has one for all its views. Rooms of an exchange that was aborted do not come back: the
    host's transport may still write into them.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self.copies = copies
        self._free: dict[int, list[torch.Tensor]] = {}  # by size
        # rooms that the device reads until the moment has passed
        self._leaving: list[tuple[Moment, list[torch.Tensor]]] = []
        self._bytes = 0  # size of the free rooms
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Return a room for at least `size` bytes."""
        rounded = 1 << (max(size, LEAST_BYTES) - 1).bit_length()
        if size > LARGE_BYTES:
            rounded = -(-size // LARGE_BYTES) * LARGE_BYTES
        with self._lock:
            self._collect()
            if free := self._free.get(rounded):
                self._bytes -= rounded
                return free.pop()
        return self.copies.room(rounded)

    def give_back(self, rooms: Sequence[torch.Tensor], after: Moment | None = None) -> None:
        """Take rooms back, which the device reads until `after`."""
        with self._lock:
            if after is None:
                self._keep(rooms)
            else:
                self._leaving.append((after, list(rooms)))

    def _collect(self) -> None:
        left = []
        for moment, rooms in self._leaving:
            if moment.query():
                self._keep(rooms)
            else:
                left.append((moment, rooms))
        self._leaving = left

    def _keep(self, rooms: Sequence[torch.Tensor]) -> None:
        for room in rooms:
            if self._bytes + room.nbytes <= POOL_BYTES_MAX:
                self._free.setdefault(room.nbytes, []).append(room)
                self._bytes += room.nbytes


class _StagedPending:
    """Is an exchange under way whose messages pass through host memory."""

    def __init__(self, inner: Pending, rooms: HostRooms, sent: list[torch.Tensor]) -> None:
        self._inner = inner
        self._rooms = rooms
        self._sent = sent
        self.received: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.after: Moment | None = None  # a moment after the work queued before the exchange

    def is_done(self) -> bool:
        return self._inner.is_done()

    def wait(self, waits: Waits | None = None) -> None:
        self._inner.wait(waits)
        self._rooms.give_back(self._sent)
        received, self.received, self._sent = self.received, [], []
        if received and self.after is not None:
            copies = [(tensor, place) for tensor, place, _ in received]
            try:
                done = self._rooms.copies.to_device(copies, self.after)
            except RuntimeError as error:
                raise Aborted(f"a copy to the GPU has failed: {first_line(error)}") from None
            self._rooms.give_back([room for _, _, room in received], done)


class StagedTransport:
    """Implements `Transport` for device and host tensors over one for host tensors."""

    ordered = False

    def __init__(self, host: Transport, rooms: HostRooms) -> None:
        self._host = host
        self._rooms = rooms

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        self._host.open(rank, size, rendezvous, peers)

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        if not any(tensor.is_cuda for _, tensor in (*sends, *receives)):
            return self._host.exchange(sends, receives, tag, sent_us)
        copies = self._rooms.copies
        after = copies.record_event()
        places: dict[int, torch.Tensor] = {}  # by tensor: one may go to several peers
        sent: list[torch.Tensor] = []
        leaving: list[Copy] = []
        for _, tensor in sends:
            if tensor.is_cuda and id(tensor) not in places:
                sent.append(self._rooms.take(tensor.nbytes))
                places[id(tensor)] = _view_as(tensor, sent[-1])
                leaving.append((places[id(tensor)], tensor))
        received, host_receives = [], []
        for peer, tensor in receives:
            place = tensor
            if tensor.is_cuda:
                room = self._rooms.take(tensor.nbytes)
                place = _view_as(tensor, room)
                received.append((tensor, place, room))
            host_receives.append((peer, place))
        try:
            if leaving:
                copies.to_host(leaving, after)
        except RuntimeError as error:
            raise Aborted(f"a copy from the GPU has failed: {first_line(error)}") from None
        host_sends = [(peer, places.get(id(tensor), tensor)) for peer, tensor in sends]
        inner = self._host.exchange(host_sends, host_receives, tag, sent_us)
        pending = _StagedPending(inner, self._rooms, sent)
        pending.received, pending.after = received, after
        return pending

    def listen(
        self, tag: int, size: int, hear: Callable[[int, bytes], None], *, always: bool = False
    ) -> None:
        self._host.listen(tag, size, hear, always=always)

    def go_on(self) -> None:
        self._host.go_on()

    def lost_ranks(self) -> Sequence[int]:
        return self._host.lost_ranks()

    def abort(self) -> None:
        self._host.abort()

    def close(self) -> None:
        self._host.close()


def _view_as(tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """View the beginning of a room as a tensor like this one."""
    return room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
