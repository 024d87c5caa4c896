"""Carries device tensors between GPUs: with NCCL where possible, else through pinned host memory.

NCCL runs one communicator's operations in the order of their issue and ignores tags, so all members
must issue the same exchanges in the same order: with `ordered` the engine reduces its buckets one
after the other. Aborting aborts the communicator, which ends its kernels on this side; the host's
transport, cut at the same moment, carries the news to the peers.

NCCL refuses two ranks on one GPU. So `GpuTransport` has all members compare their GPUs first: where
two share one, or a member lacks NCCL, all of them stage their tensors through the host. A tensor is
copied to the host before the host's transport sends it. A received tensor is copied to the GPU in a
stream of its own: the GPU waits for these copies, the host does not.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from holdfast.engine.core.errors import Aborted, first_line
from holdfast.engine.core.spread_turns import find_branches, plan_turns
from holdfast.engine.train.exchange.layout import gather_records
from holdfast.engine.train.exchange.seam import Message, Pending, Rendezvous, Transport, Waits

POOL_BYTES_MAX = 1 << 30  # the largest size of all rooms that wait to be used again
LEAST_BYTES = 1 << 12
LARGE_BYTES = 1 << 26  # rooms are a power of two in size, and above this a multiple of it
Copy = tuple[torch.Tensor, torch.Tensor]  # to, from
TAG_UNIQUE_ID, TAG_GPU = 9, 10
GPU_ID_BYTES = 16
NO_NCCL = bytes(GPU_ID_BYTES)
# A wait begins with short pauses between its looks; each later one is longer, up to POLL_S.
FIRST_POLL_S, POLL_GROWTH, POLL_S = 20e-6, 1.25, 0.5e-3
UNIQUE_ID_BYTES_MAX = 4096


class Moment(Protocol):
    """Marks a place in the work that is queued on a device, as torch.cuda.Event does."""

    def query(self) -> bool:
        """Return whether the device has come so far."""
        ...


class DeviceCopies:
    """Copies between one GPU and the host, in another stream than the computation."""

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
        #: A moment after the work queued before the exchange.
        self.after: Moment | None = None

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


class OverHost:
    """Is the part of a transport for which it uses the host's: only that knows who is lost."""

    def __init__(self, host: Transport) -> None:
        self._host = host

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        self._host.open(rank, size, rendezvous, peers)

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


class StagedTransport(OverHost):
    """Implements `Transport` for device and host tensors over one for host tensors."""

    ordered = False

    def __init__(self, host: Transport, rooms: HostRooms) -> None:
        super().__init__(host)
        self._rooms = rooms

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


def _view_as(tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """View the beginning of a room as a tensor like this one."""
    return room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class UniqueIdStore(dist.Store):
    """Gives NCCL the store that it expects: rank 0 sets the communicator's id, which all ranks get.

    It spreads along a binomial tree, through connections that a view has from its beginning.
    """

    def __init__(self, rank: int, size: int, host: Transport) -> None:
        super().__init__()
        self._giver, self._takers = find_branches(rank, 0, size)
        self._host = host
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # NCCL sets bytes
        self._values[key] = bytes(value)
        if self._giver is None:
            body = torch.zeros(UNIQUE_ID_BYTES_MAX, dtype=torch.uint8)
            body[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            self._give(torch.tensor([len(value)]), body)

    def get(self, key: str) -> bytes:
        if key not in self._values and self._giver is not None:
            size = torch.zeros(1, dtype=torch.int64)
            body = torch.zeros(UNIQUE_ID_BYTES_MAX, dtype=torch.uint8)
            receives = [(self._giver, size), (self._giver, body)]
            self._host.exchange([], receives, TAG_UNIQUE_ID).wait()
            self._give(size, body)
            self._values[key] = body[: int(size[0])].numpy().tobytes()
        return self._values[key]

    def _give(self, size: torch.Tensor, body: torch.Tensor) -> None:
        sends = [message for taker in self._takers for message in ((taker, size), (taker, body))]
        if sends:
            self._host.exchange(sends, [], TAG_UNIQUE_ID).wait()

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


@dataclass(slots=True)
class _NcclPending:
    done: torch.cuda.Event
    transport: NcclTransport
    host: Pending | None

    def is_done(self) -> bool:
        is_here = self.host is None or self.host.is_done()
        return self.transport.aborted or (is_here and self.done.query())

    def wait(self, waits: Waits | None = None) -> None:
        # `waits` gets no times: NCCL does not report which peer's messages have arrived, and times
        # of messages through the host do not measure the links between GPUs. The event is polled,
        # so that an abort is noticed even when an aborted kernel never signals it.
        pause, pause_s = threading.Event(), FIRST_POLL_S
        while not self.done.query():
            if self.transport.aborted:
                raise Aborted("the view was given up")
            pause.wait(pause_s)
            pause_s = min(pause_s * POLL_GROWTH, POLL_S)
        if self.host is not None:
            self.host.wait()
        if self.transport.aborted:
            raise Aborted("the view was given up")


class NcclTransport(OverHost):
    """Implements `Transport` for one view: an NCCL communicator, and `host` for host tensors."""

    ordered = True

    def __init__(self, host: Transport, cuda: torch.device) -> None:
        super().__init__(host)
        self._cuda = cuda
        self._group: dist.ProcessGroupNCCL | None = None
        self._stream: torch.cuda.Stream | None = None
        self.aborted = False

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        super().open(rank, size, rendezvous, peers)
        self.connect(rank, size)

    def connect(self, rank: int, size: int) -> None:
        """Connect by NCCL, once the host's transport is open."""
        store = UniqueIdStore(rank, size, self._host)
        with torch.cuda.device(self._cuda):
            self._stream = torch.cuda.Stream()
            self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        if self.aborted:
            raise Aborted("the view was given up while its group was built")

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        host_sends = [m for m in sends if not m[1].is_cuda]
        host_receives = [m for m in receives if not m[1].is_cuda]
        host = None
        if host_sends or host_receives or not (sends or receives):
            host = self._host.exchange(host_sends, host_receives, tag, sent_us)
        device_sends = [m for m in sends if m[1].is_cuda]
        device_receives = [m for m in receives if m[1].is_cuda]
        if host is not None and not (device_sends or device_receives):
            return host
        return _NcclPending(self._exchange_on_device(device_sends, device_receives), self, host)

    def abort(self) -> None:
        self.aborted = True
        self._host.abort()
        group, self._group = self._group, None
        if group is not None:
            # Aborting waits for kernels to end; a thread does that, so that the caller need not
            # wait.
            threading.Thread(target=group.abort, daemon=True).start()

    def close(self) -> None:
        self.abort()
        self._host.close()

    def _exchange_on_device(
        self, sends: list[Message], receives: list[Message]
    ) -> torch.cuda.Event:
        group, stream = self._group, self._stream
        if group is None or stream is None or self.aborted:
            raise Aborted("the view was given up")
        done = torch.cuda.Event()
        # The tensors were written on the default stream: start after the work queued there.
        stream.wait_stream(torch.cuda.default_stream(self._cuda))
        try:
            with torch.cuda.device(self._cuda), torch.cuda.stream(stream):
                works = []
                group._group_start()
                for peer, tensor in receives:
                    works.append(group.recv([tensor], peer, 0))  # type: ignore[attr-defined]
                for peer, tensor in sends:
                    works.append(group.send([tensor], peer, 0))  # type: ignore[attr-defined]
                group._group_end()
                for work in works:
                    work.wait()  # orders the stream after the exchange; does not block the host
                done.record()
        except RuntimeError as error:
            raise Aborted(f"nccl: {first_line(error)}") from None
        return done


class GpuTransport(OverHost):
    """Implements `Transport` for one view: by NCCL where possible, else through the host.

    `gpu_id`: an id that no other GPU has, or NO_NCCL. `ordered` is known once it is open.
    """

    def __init__(
        self, host: Transport, device: torch.device, rooms: HostRooms, gpu_id: bytes
    ) -> None:
        super().__init__(host)
        self._device = device
        self._rooms = rooms
        self._gpu_id = gpu_id
        self._over: Transport | None = None
        self._lock = threading.Lock()
        self._aborted = False
        self.ordered = False

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        self._host.open(rank, size, rendezvous, peers)
        over: NcclTransport | StagedTransport
        if can_use_nccl(self._all_devices(rank, size)):
            over = NcclTransport(self._host, self._device)
        else:
            over = StagedTransport(self._host, self._rooms)
        with self._lock:
            if self._aborted:
                raise Aborted("the view was given up while its group was built")
            self._over, self.ordered = over, over.ordered
        if isinstance(over, NcclTransport):
            over.connect(rank, size)

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        if self._over is None:
            raise Aborted("the view was given up")
        return self._over.exchange(sends, receives, tag, sent_us)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            over = self._over or self._host
        over.abort()

    def close(self) -> None:
        self.abort()
        (self._over or self._host).close()

    def _all_devices(self, rank: int, size: int) -> list[bytes]:
        """Return every member's GPU, by rank."""
        mine = torch.frombuffer(bytearray(self._gpu_id), dtype=torch.uint8)
        found = gather_records(self._host, rank, plan_turns(rank, size), mine, TAG_GPU)
        return [row.numpy().tobytes() for row in found]


def can_use_nccl(gpu_ids: Sequence[bytes]) -> bool:
    """Return whether NCCL can connect members on these GPUs: each must have one of its own."""
    return NO_NCCL not in gpu_ids and len(set(gpu_ids)) == len(gpu_ids)


def gpu_id_of(device: torch.device) -> bytes:
    """Return an id that no other GPU has; NO_NCCL where NCCL is missing."""
    if not dist.is_nccl_available():
        return NO_NCCL
    # The parts of a GPU that MIG has cut share its id, and NCCL does not connect them either.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.sha256(uuid.encode()).digest()[:GPU_ID_BYTES]
