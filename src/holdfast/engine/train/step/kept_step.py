"""Keeps a reduced step apart from the buckets, for workers that have not taken part in it.

The whole result of a step can also be taken as one image, and put back for the script.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.engine.core.errors import WireError, first_line
from holdfast.engine.train.step.row_table import Rows
from holdfast.engine.train.step.step_data import StepData

HEAD = 4  # numbers: the view in which it was reduced, two sizes, and whether the loop stops
LENGTH = struct.Struct("!I")
# for each table, its number of rows, and whether these are all of them
TableSizes = Sequence[tuple[int, bool]]


class ImageHead(msgspec.Struct, frozen=True):
    """Is the head of a step's image: its plan, and the size of each buffer that follows."""

    plan: int
    tables: tuple[tuple[int, bool], ...]
    buckets: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """Is one member's copy of a step; only the pieces differ between members."""

    pieces: tuple[torch.Tensor, ...]  # this member's piece of each bucket's sum
    head: torch.Tensor  # [HEAD] int64
    rows: torch.Tensor
    used: torch.Tensor
    left: torch.Tensor  # the buffers of virtual rank 0
    told: torch.Tensor  # values, as bytes
    tables: tuple[Rows, ...]

    @classmethod
    def of(
        cls,
        step: StepData,
        piece: Callable[[int], slice],
        copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> KeptStep:
        """Copy a reduced step, which the script has not touched yet.

        `piece` returns this member's slice of a sum with that number of elements; `copy` copies it.
        """
        results = [bucket.result.data for bucket in step.gradients.active]
        head, rows, used, left, told = _shared_parts(step)
        return cls(
            head=head,
            pieces=tuple(copy(r[piece(r.numel())]) for r in results),
            rows=rows.clone(),
            used=used.clone(),
            left=left.clone(),
            told=told,
            tables=tuple(table.result.copy() for table in step.gradients.active_tables),
        )

    @property
    def nbytes(self) -> int:
        """Return how much memory its gradients take."""
        rows = sum(each.places.nbytes + each.values.nbytes for each in self.tables)
        return rows + sum(piece.nbytes for piece in self.pieces)


def image_of(step: StepData) -> list[torch.Tensor]:
    """Return the tensors of a reduced step whose bytes are its image, in order.

    Large tensors are not copied: the script must not change them meanwhile.
    """
    gradients = step.gradients
    tables = [table.result for table in gradients.active_tables]
    head, rows, used, left, told = _shared_parts(step)
    every = [bucket.result.data for bucket in gradients.active]
    every += [head, rows, used.to(torch.uint8), left, told]
    every += [part for table in tables for part in (table.places, table.values)]
    about = ImageHead(
        plan=gradients.plan,
        tables=tuple((len(table.places), table.dense) for table in tables),
        buckets=len(gradients.active),
        sizes=tuple(each.nbytes for each in every),
    )
    data = msgspec.msgpack.encode(about)
    return [_tensor_of(LENGTH.pack(len(data)) + data), *every]


def put_image(step: StepData, image: memoryview) -> None:
    """Restore a step for the script, from its image. WireError if that does not fit."""
    try:
        (length,) = LENGTH.unpack(image[: LENGTH.size])
        at = LENGTH.size + length
        about = msgspec.msgpack.decode(image[LENGTH.size : at], type=ImageHead)
        gradients = step.gradients
        if (about.plan, about.buckets) != (gradients.plan, len(gradients.active)):
            raise WireError("its gradient is of other parameters than this script trains")
        buffers = []
        for size in about.sizes:
            bytes_of = image[at : at + size]
            buffers.append(torch.frombuffer(bytes_of, dtype=torch.uint8) if size else room(0))
            at += size
        for bucket, data in zip(gradients.active, buffers, strict=False):
            place = bucket.result.data
            place.copy_(data.view(place.dtype).view(place.shape))
        put_buffers(step, about.tables, buffers[about.buckets :])
    except (struct.error, msgspec.MsgspecError, RuntimeError, ValueError, IndexError) as error:
        raise WireError(f"an image of a step does not fit: {first_line(error)}") from None


def put_buffers(step: StepData, sizes: TableSizes, buffers: Sequence[torch.Tensor]) -> None:
    """Restore the parts that are the same on all members for the script, from their bytes.

    These are the head, the rows, `used`, the buffers of virtual rank 0, values, and the places and
    values of each table. WireError, IndexError or RuntimeError if they do not fit.
    """
    words, rows, used, left, values = buffers[0], buffers[1], *buffers[2:5]
    words = words.view(torch.int64)
    if words.numel() != HEAD:
        raise WireError("the head of a step has another length")
    table = step.table.rows
    table.copy_(rows.view(table.dtype).view(table.shape))
    rest = iter(buffers[5:])
    for each, (count, dense) in zip(step.gradients.active_tables, sizes, strict=True):
        found = each.make_rows(count, dense=dense)
        for place in (found.places, found.values):
            place.copy_(next(rest).view(place.dtype).view(place.shape))
        each.result = found
    put_shared(step, words, used, left, values)


def put_shared(
    step: StepData,
    head: torch.Tensor,
    used: torch.Tensor,
    left: torch.Tensor,
    told: torch.Tensor,
) -> None:
    """Restore the parts that are the same on all members, except the rows, for the script."""
    view, _, _, stops = head.tolist()
    step.table.used.copy_(used)
    if left.numel():
        step.buffers.receive(left)
    step.values.receive(told.numpy().tobytes())
    step.table.stops = bool(stops)
    step.record_reduced(view)


def _shared_parts(step: StepData) -> tuple[torch.Tensor, ...]:
    """Return the parts that all members share: head, rows, `used`, buffers left, and values."""
    left = room(0) if step.buffers.left is None else step.buffers.left
    told = _tensor_of(step.values.encode())
    words = [step.reduced_in, left.numel(), told.numel(), int(step.table.stops)]
    return torch.tensor(words, dtype=torch.int64), step.table.rows, step.table.used, left, told


def room(count: int) -> torch.Tensor:
    """Return room for `count` bytes: [count] uint8."""
    return torch.empty(count, dtype=torch.uint8)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else room(0)
