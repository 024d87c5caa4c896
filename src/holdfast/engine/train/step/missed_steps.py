"""Keeps the steps that a late worker has missed, and applies them there when it returns.

While a worker is suspended, each member keeps its piece of every reduced gradient, so that together
they have them all. The returning worker passes them to its script one by one, as if it had taken
part; no state is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.membership.formation import STEPS_MISSED_MAX
from holdfast.engine.train.exchange.layout import TAG_STATE, piece_of
from holdfast.engine.train.exchange.seam import Message, Transport
from holdfast.engine.train.step.kept_step import HEAD, KeptStep, put_shared, room
from holdfast.engine.train.step.row_table import Rows
from holdfast.engine.train.step.step_data import StepData

KEPT_BYTES_MAX = 256 << 20  # limit on each member, unless these are fewer steps than:
KEPT_STEPS_MIN = 4


class MissedSteps:
    """Keeps steps that others miss, and receives them. `step`: shared by script and engine."""

    def __init__(self, step: StepData) -> None:
        self._step = step
        self._kept: dict[int, KeptStep] = {}
        self._bytes = 0

    def keep(self, index: int, piece: Callable[[int], slice]) -> None:
        """Keep a reduced step, which the script has not touched yet.

        `piece`: returns this member's slice of a sum with that number of elements.
        """
        self._kept[index] = KeptStep.of(self._step, piece)
        self._bytes += self._kept[index].nbytes
        while len(self._kept) > STEPS_MISSED_MAX or (
            self._bytes > KEPT_BYTES_MAX and len(self._kept) > KEPT_STEPS_MIN
        ):
            self._bytes -= self._kept.pop(min(self._kept)).nbytes

    def forget(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def send(self, transport: Transport, to: int, steps: range, *, first: bool) -> None:
        """Send steps to rank `to`; the `first` sender adds the parts that all have. Aborted."""
        for index in steps:
            kept = self._kept.get(index)
            if kept is None:
                raise Aborted(f"step {index} was not kept for rank {to}")
            sends = [(to, piece) for piece in kept.pieces if piece.numel()]
            if first:
                used = kept.used.to(torch.uint8)
                parts = (kept.head, kept.rows, used, kept.left, kept.told)
                every = (*parts, *_encode_in_parts(kept.tables))
                sends += [(to, part) for part in every if part.numel()]
            transport.exchange(sends, [], TAG_STATE).wait()

    def receive(self, transport: Transport, donors: list[int]) -> None:
        """Receive one step into the tensors of its result. Aborted."""
        step = self._step
        for number, donor in enumerate(donors):
            receives: list[Message] = []
            for bucket in step.gradients.active:
                data = bucket.result.data
                piece = data[piece_of(number, len(donors), data.numel())]
                receives += [(donor, piece)] if piece.numel() else []
            transport.exchange([], receives, TAG_STATE).wait()
        head = torch.zeros(HEAD, dtype=torch.int64)
        used = step.table.used.to(torch.uint8)
        same = [part for part in (head, step.table.rows, used) if part.numel()]
        transport.exchange([], [(donors[0], part) for part in same], TAG_STATE).wait()
        _, left_bytes, told_bytes, _ = head.tolist()
        left, told = room(left_bytes), room(told_bytes)
        rest = [(donors[0], part) for part in (left, told) if part.numel()]
        if rest:
            transport.exchange([], rest, TAG_STATE).wait()
        self._receive_tables(transport, donors[0])
        put_shared(step, head, used, left, told)

    def _receive_tables(self, transport: Transport, donor: int) -> None:
        tables = self._step.gradients.active_tables
        if not tables:
            return
        sizes = torch.zeros(len(tables), 2, dtype=torch.int64)
        transport.exchange([], [(donor, sizes)], TAG_STATE).wait()
        for table, (count, dense) in zip(tables, sizes.tolist(), strict=True):
            table.result = table.make_rows(count, dense=bool(dense))
        parts = _encode_in_parts([table.result for table in tables])[1:]
        receives = [(donor, part) for part in parts if part.numel()]
        transport.exchange([], receives, TAG_STATE).wait()


def _encode_in_parts(tables: Sequence[Rows]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that encode these tables: first the number of rows of each."""
    sizes = torch.tensor([(len(t.places), int(t.dense)) for t in tables], dtype=torch.int64)
    return (sizes, *(part for t in tables for part in (t.places, t.values)))
