"""Keeps steps that a late worker has missed, on those who went on, and applies them on it later.

While somebody is suspended, each member keeps its piece of every reduced gradient, so that together
they hold them all. The one that returns hands them to its script one by one, as if it had taken
part; no state is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.core.errors import Aborted
from holdfast.core.membership.formation import STEPS_MISSED_MAX
from holdfast.train.step.reduction import TAG_STATE, piece_of
from holdfast.train.step.row_table import Rows
from holdfast.train.step.step_data import StepData
from holdfast.train.transport.seam import Message, Transport

KEPT_BYTES_MAX = 256 << 20  # on each member; but at least
KEPT_STEPS_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Holds a step as one member keeps it."""

    pieces: tuple[torch.Tensor, ...]  # of each bucket's sum
    head: torch.Tensor  # the rest is the same on all members: sizes and flags,
    rows: torch.Tensor
    used: torch.Tensor
    left: torch.Tensor  # the buffers of virtual rank 0
    told: torch.Tensor  # values, as bytes
    tables: tuple[Rows, ...]

    @property
    def nbytes(self) -> int:
        """Return how much memory its gradients take."""
        rows = sum(each.places.nbytes + each.values.nbytes for each in self.tables)
        return rows + sum(piece.nbytes for piece in self.pieces)


class MissedSteps:
    """Keeps steps that others miss, and receives such. `step`: what script and engine share."""

    def __init__(self, step: StepData) -> None:
        self._step = step
        self._kept: dict[int, _Kept] = {}
        self._bytes = 0

    def keep(self, index: int, piece: Callable[[int], slice]) -> None:
        """Keep a reduced step, which the script has not touched yet.

        `piece`: what of a sum with so many elements falls to this member.
        """
        step = self._step
        results = [bucket.result.data for bucket in step.gradients.active]
        left = _bytes(0) if step.buffers.left is None else step.buffers.left.clone()
        told = _of(step.values.encoded())
        tables = tuple(table.result.copy() for table in step.gradients.active_tables)
        head = [step.reduced_in, left.numel(), told.numel(), int(step.table.stops)]
        self._kept[index] = _Kept(
            head=torch.tensor(head, dtype=torch.int64),
            pieces=tuple(r[piece(r.numel())].clone() for r in results),
            rows=step.table.rows.clone(),
            used=step.table.used.clone(),
            left=left,
            told=told,
            tables=tables,
        )
        self._bytes += self._kept[index].nbytes
        while len(self._kept) > STEPS_MISSED_MAX or (
            self._bytes > KEPT_BYTES_MAX and len(self._kept) > KEPT_STEPS_MIN
        ):
            self._bytes -= self._kept.pop(min(self._kept)).nbytes

    def forget(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def send(self, transport: Transport, to: int, steps: range, *, first: bool) -> None:
        """Send steps to rank `to`; the `first` sender adds what all of them have. Aborted."""
        for index in steps:
            kept = self._kept.get(index)
            if kept is None:
                raise Aborted(f"step {index} was not kept for rank {to}")
            sends = [(to, piece) for piece in kept.pieces if piece.numel()]
            if first:
                used = kept.used.to(torch.uint8)
                parts = (kept.head, kept.rows, used, kept.left, kept.told)
                every = (*parts, *_in_parts(kept.tables))
                sends += [(to, part) for part in every if part.numel()]
            transport.exchange(sends, [], TAG_STATE).wait()

    def receive(self, transport: Transport, donors: list[int]) -> None:
        """Receive one step, into the place of its result. Aborted."""
        step = self._step
        for number, donor in enumerate(donors):
            receives: list[Message] = []
            for bucket in step.gradients.active:
                data = bucket.result.data
                piece = data[piece_of(number, len(donors), data.numel())]
                receives += [(donor, piece)] if piece.numel() else []
            transport.exchange([], receives, TAG_STATE).wait()
        head = torch.zeros(4, dtype=torch.int64)
        used = step.table.used.to(torch.uint8)
        same = [part for part in (head, step.table.rows, used) if part.numel()]
        transport.exchange([], [(donors[0], part) for part in same], TAG_STATE).wait()
        step.table.used.copy_(used)
        view, left_bytes, told_bytes, stops = head.tolist()
        left, told = _bytes(left_bytes), _bytes(told_bytes)
        rest = [(donors[0], part) for part in (left, told) if part.numel()]
        if rest:
            transport.exchange([], rest, TAG_STATE).wait()
        self._receive_tables(transport, donors[0])
        if left.numel():
            step.buffers.receive(left)
        step.values.receive(told.numpy().tobytes())
        step.table.stops = bool(stops)
        step.became_reduced(view)

    def _receive_tables(self, transport: Transport, donor: int) -> None:
        tables = self._step.gradients.active_tables
        if not tables:
            return
        sizes = torch.zeros(len(tables), 2, dtype=torch.int64)
        transport.exchange([], [(donor, sizes)], TAG_STATE).wait()
        for table, (count, dense) in zip(tables, sizes.tolist(), strict=True):
            table.result = Rows.none(table.param, count, dense=bool(dense))
        parts = _in_parts([table.result for table in tables])[1:]
        receives = [(donor, part) for part in parts if part.numel()]
        transport.exchange([], receives, TAG_STATE).wait()


def _in_parts(tables: Sequence[Rows]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that tell of these tables: first how many rows there are of each."""
    sizes = torch.tensor([(len(t.places), int(t.dense)) for t in tables], dtype=torch.int64)
    return (sizes, *(part for t in tables for part in (t.places, t.values)))


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _bytes(0)
