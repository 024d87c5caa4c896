"""Represents a reduced step apart from the buckets, for processes that took no part in it.

An image has two parts: pieces of the buckets' sums, and a shared part that is the same on all
members (losses, buffers, values, rows of tables). A member sends or keeps its own pieces; the
shared part is needed once. The nodes' memory keeps whole images (`encode`), a feed sends their
buffers in frames, and a member that returns receives them in messages of its view.

While a worker is suspended, each member keeps its piece of every reduced gradient, so that together
they have them all (MissedSteps). The returning worker passes them to its script one by one, as if
it had taken part; no state is sent.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.engine.core.errors import Aborted, WireError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.membership.formation import STEPS_MISSED_MAX
from holdfast.engine.train.exchange.layout import TAG_STATE, piece_of
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tensor_bytes import room
from holdfast.engine.train.step.mover import Events, StateSink, StateSource, ViewConnections
from holdfast.engine.train.step.row_table import Rows
from holdfast.engine.train.step.step_data import StepData

HEAD_WORDS = 4  # the view in which it was reduced, two sizes, and whether the loop stops
#: Shared buffers that each image has. The buffers of tables follow.
FIXED = 5
#: Limit on the steps that a member keeps for others, unless these are fewer steps than:
KEPT_BYTES_MAX = 256 << 20
KEPT_STEPS_MIN = 4
LENGTH = struct.Struct("!I")
# For each table, its number of rows, and whether these are all of them.
TableSizes = Sequence[tuple[int, bool]]


class ImageHead(msgspec.Struct, frozen=True):
    """Is the head of an encoded image. `sizes`: bytes of each buffer; `buckets` come first."""

    plan: int
    tables: tuple[tuple[int, bool], ...]
    buckets: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepImage:
    """Is one member's image of a step.

    `plan`: 63 bits that stand for the summed parameters. `pieces`: one for each bucket. `shared`:
    the head, the rows of the step's table, `used`, the buffers of virtual rank 0, values, and the
    places and values of each table of rows; empty if another member gives it. Received buffers may
    be plain bytes.
    """

    plan: int
    pieces: Sequence[torch.Tensor]
    tables: TableSizes = ()
    shared: Sequence[torch.Tensor] = ()

    @classmethod
    def view(cls, step: StepData) -> StepImage:
        """Return the whole step. Large tensors are not copied, so they must not change."""
        gradients = step.gradients
        tables = [table.result for table in gradients.active_tables]
        left = room(0) if step.buffers.left is None else step.buffers.left
        values = tensor_of(step.values.encode())
        words = [step.reduced_in, left.numel(), values.numel(), int(step.table.stops)]
        used = step.table.used.to(torch.uint8)
        shared = [torch.tensor(words, dtype=torch.int64), step.table.rows, used, left, values]
        shared += [part for rows in tables for part in (rows.places, rows.values)]
        sizes = tuple((len(rows.places), rows.dense) for rows in tables)
        return cls(gradients.plan, [b.result.data for b in gradients.active], sizes, shared)

    @classmethod
    def copy(
        cls,
        step: StepData,
        piece: Callable[[int], slice],
        copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
        *,
        with_shared: bool = True,
    ) -> StepImage:
        """Copy one member's part of a reduced step, which the script has not touched yet.

        `piece` returns this member's slice of a sum with that number of elements; `copy` copies it.
        """
        whole = cls.view(step)
        pieces = [copy(each[piece(each.numel())]) for each in whole.pieces]
        if not with_shared:
            return cls(whole.plan, pieces)
        return cls(whole.plan, pieces, whole.tables, [part.clone() for part in whole.shared])

    @classmethod
    def of_buffers(
        cls, plan: int, tables: TableSizes, buffers: Sequence[torch.Tensor], buckets: int
    ) -> StepImage:
        """Return an image of received buffers, the first of them pieces of `buckets`."""
        return cls(plan, buffers[:buckets], tables, buffers[buckets:])

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Return all tensors, in the order in which they are sent."""
        return [*self.pieces, *self.shared]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its gradients."""
        return sum(each.nbytes for each in (*self.pieces, *self.shared[FIXED:]))

    # ------------------------------------------------------------ whole images, as bytes

    def encode(self) -> list[torch.Tensor]:
        """Return tensors whose bytes, one after the other, are the encoded image."""
        head = ImageHead(
            plan=self.plan,
            tables=tuple(self.tables),
            buckets=len(self.pieces),
            sizes=tuple(each.nbytes for each in self.buffers),
        )
        data = msgspec.msgpack.encode(head)
        return [tensor_of(LENGTH.pack(len(data)) + data), *self.buffers]

    @classmethod
    def decode(cls, image: memoryview) -> StepImage:
        """Return an encoded image; its buffers share the memory. WireError."""
        try:
            (length,) = LENGTH.unpack(image[: LENGTH.size])
            at = LENGTH.size + length
            head = msgspec.msgpack.decode(image[LENGTH.size : at], type=ImageHead)
            buffers = []
            for size in head.sizes:
                part = image[at : at + size]
                buffers.append(torch.frombuffer(part, dtype=torch.uint8) if size else room(0))
                at += size
        except (struct.error, msgspec.MsgspecError, ValueError) as error:
            raise WireError(f"an image of a step cannot be read: {first_line(error)}") from None
        return cls.of_buffers(head.plan, head.tables, buffers, head.buckets)


def put_images(step: StepData, images: Sequence[StepImage]) -> None:
    """Restore a step for the script from one image of each member, by rank. WireError.

    The first image has the shared part.
    """
    first, gradients = images[0], step.gradients
    active = gradients.active
    if any((each.plan, len(each.pieces)) != (gradients.plan, len(active)) for each in images):
        raise WireError("its gradient is of other parameters than this script trains")
    try:
        for rank, image in enumerate(images):
            for bucket, data in zip(active, image.pieces, strict=True):
                sums = bucket.result.data
                put_bytes(data, sums[piece_of(rank, len(images), sums.numel())])
        head, rows, used, left, values = first.shared[:FIXED]
        put_bytes(rows, step.table.rows)
        parts = [
            part for each in make_rows(step, first.tables) for part in (each.places, each.values)
        ]
        for data, place in zip(first.shared[FIXED:], parts, strict=True):
            put_bytes(data, place)
        put_shared(step, head.view(torch.int64), used, left, values)
    except (RuntimeError, ValueError, IndexError) as error:
        raise WireError(f"an image of a step does not fit: {first_line(error)}") from None


def make_rows(step: StepData, sizes: TableSizes) -> list[Rows]:
    """Make room for the sum of each table of rows, in the place of the present one."""
    tables = step.gradients.active_tables
    for table, (count, dense) in zip(tables, sizes, strict=True):
        table.result = table.make_rows(count, dense=bool(dense))
    return [table.result for table in tables]


def put_shared(
    step: StepData,
    head: torch.Tensor,
    used: torch.Tensor,
    left: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Restore the shared part, except for rows, and record that the step is reduced."""
    view, _, _, stops = head.tolist()
    step.table.used.copy_(used)
    if left.numel():
        step.buffers.receive(left)
    step.values.receive(values.numpy().tobytes())
    step.table.stops = bool(stops)
    step.record_reduced(view)


def put_bytes(data: torch.Tensor, place: torch.Tensor) -> None:
    """Copy bytes to a tensor of any type and shape. RuntimeError if they do not fit."""
    place.copy_(data.view(place.dtype).view(place.shape))


def tensor_of(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor: [bytes] uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else room(0)


LARGE_BYTES = 1 << 20  # smaller blocks are the allocator's business
AHEAD = 2  # steps for which there is memory before the first is sent


class StepMemory:
    """Keeps the memory of steps on their way to followers, in blocks. Any thread may call it.

    A large block that was just allocated costs a page fault for every page, more than the copy into
    it. So a thread touches the first blocks ahead of their use, and all are used again and again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        # number of releases; a block allocated before the last one is not kept any more
        self._released = 0

    def prepare(self, sizes: Sequence[int], most: int) -> None:
        """Touch memory for a few steps, whose tensors have these sizes, in a thread.

        `most`: how many bytes all of it may take.
        """
        ahead = min(AHEAD, most // max(sum(sizes), 1))
        wanted = [size for size in sizes if size >= LARGE_BYTES] * ahead
        args = wanted, self._released
        threading.Thread(target=self._touch, args=args, name="holdfast-touch", daemon=True).start()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, made in a free block if there is one of its size."""
        if tensor.is_cuda or tensor.nbytes < LARGE_BYTES:
            return tensor.clone()
        return self.block(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def block(self, count: int) -> torch.Tensor:
        """Return a block of `count` bytes: a free one of that size, or a new one."""
        with self._lock:
            fits = (i for i, block in enumerate(self._free) if block.nbytes == count)
            at = next(fits, None)
            return room(count) if at is None else self._free.pop(at)

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back blocks, or copies in them, for later use; tensors on GPUs are freed."""
        large = [t for t in tensors if t.nbytes >= LARGE_BYTES and not t.is_cuda]
        blocks = [t.reshape(-1).view(torch.uint8) for t in large]
        with self._lock:
            self._free += blocks

    def release(self) -> None:
        """Give all free blocks back."""
        with self._lock:
            blocks, self._free = self._free, []
            self._released += 1
        free_beside(blocks)

    def _touch(self, sizes: Sequence[int], released: int) -> None:
        for size in sizes:
            block = room(size).zero_()
            with self._lock:
                if self._released != released:
                    return
                self._free.append(block)


def free_beside(blocks: list[torch.Tensor]) -> None:
    """Give memory back to the system in a thread, because freeing many touched pages takes long.

    `blocks`: the only reference to them; the caller must keep no other.
    """
    threading.Thread(target=blocks.clear, name="holdfast-free", daemon=True).start()


class MissedSteps(StateSink, StateSource):
    """Keeps steps for members that are suspended, and receives them where this one was.

    `step`: shared by script and engine.
    """

    def __init__(self, step: StepData) -> None:
        self._step = step
        self._kept: dict[int, StepImage] = {}
        self._bytes = 0

    # ------------------------------------------------------------ on the members

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Keep this member's piece of a reduced step, which the script has not touched yet."""
        self._kept[order.step] = image = StepImage.copy(self._step, at.piece)
        self._bytes += image.nbytes
        while len(self._kept) > STEPS_MISSED_MAX or (
            self._bytes > KEPT_BYTES_MAX and len(self._kept) > KEPT_STEPS_MIN
        ):
            self._bytes -= self._kept.pop(min(self._kept)).nbytes
        return ()

    def forget(self, order: ef.Forget) -> None:
        """Drop every step that was kept: no member needs it any more."""
        self._kept.clear()
        self._bytes = 0

    def send_kept(self, order: ef.SendMissed, at: ViewConnections) -> None:
        """Send a member the steps that it has missed. Aborted.

        Its first donor adds the shared part.
        """
        to, is_first = at.view.rank(order.to.worker), at.layout.rank == at.donors[0]
        for index in range(order.to.committed, at.view.resume_step):
            image = self._kept.get(index)
            if image is None:
                raise Aborted(f"step {index} was not kept for rank {to}")
            sizes = torch.tensor(image.tables, dtype=torch.int64)
            shared = (*image.shared[:FIXED], sizes, *image.shared[FIXED:]) if is_first else ()
            sends = [(to, part) for part in (*image.pieces, *shared) if part.numel()]
            at.transport.exchange(sends, [], TAG_STATE).wait()

    # ------------------------------------------------------------ on the late worker

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Receive one step, into the place of its result. Aborted."""
        assert at is not None, "members give steps in a view"
        step, transport, donors = self._step, at.transport, at.donors
        first = donors[0]
        for number, donor in enumerate(donors):
            sums = [bucket.result.data for bucket in step.gradients.active]
            pieces = [each[piece_of(number, len(donors), each.numel())] for each in sums]
            _receive(transport, donor, pieces)
        head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
        used = step.table.used.to(torch.uint8)
        _receive(transport, first, [head, step.table.rows, used])
        left, values = (room(count) for count in head.tolist()[1:3])
        _receive(transport, first, [left, values])
        sizes = torch.zeros(len(step.gradients.active_tables), 2, dtype=torch.int64)
        _receive(transport, first, [sizes])
        rows = make_rows(step, sizes.tolist())
        _receive(transport, first, [part for each in rows for part in (each.places, each.values)])
        put_shared(step, head, used, left, values)
        return (ev.StepObtained(SourceKind.MEMBERS, order.view, order.step),)


def _receive(transport: Transport, donor: int, places: Sequence[torch.Tensor]) -> None:
    receives = [(donor, place) for place in places if place.numel()]
    if receives:
        transport.exchange([], receives, TAG_STATE).wait()
