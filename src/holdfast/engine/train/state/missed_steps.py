"""Keeps the steps that a late worker has missed, and applies them there when it returns.

While a worker is suspended, each member keeps its piece of every reduced gradient, so that together
they have them all. The returning worker passes them to its script one by one, as if it had taken
part; no state is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.membership.formation import STEPS_MISSED_MAX
from holdfast.engine.train.exchange.layout import TAG_STATE, piece_of
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tensor_bytes import room
from holdfast.engine.train.state.step_image import (
    FIXED,
    HEAD_WORDS,
    StepImage,
    make_rows,
    put_shared,
)
from holdfast.engine.train.step.mover import Events, StateSink, StateSource, ViewConnections
from holdfast.engine.train.step.step_data import StepData

KEPT_BYTES_MAX = 256 << 20  # limit on each member, unless these are fewer steps than:
KEPT_STEPS_MIN = 4


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
