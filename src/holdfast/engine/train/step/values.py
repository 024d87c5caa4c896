"""Sends all members the values of tasks besides gradients, or the leader's proposal.

A step of kind VALUES exchanges them: bytes, by virtual rank or as the leader's. In a step of
gradients the reports of its tasks travel in the same way. No sums are made here: each receiver
makes them, in the order of virtual ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.spread_turns import Turn
from holdfast.engine.core.views import View
from holdfast.engine.train.exchange.layout import TAG_VALUES, Layout
from holdfast.engine.train.exchange.seam import Pending, Transport, is_done

PROPOSAL = -1  # the place of the leader's proposal, beside the virtual ranks
VALUES_BYTES_MAX = 1 << 32  # limit for the values of one member in a step
_decode = msgspec.msgpack.Decoder(dict[int, bytes]).decode


class StepValues:
    """Keeps the values of the open step. Used with the monitor held."""

    def __init__(self) -> None:
        self.told: dict[int, bytes] = {}  # by virtual rank, or PROPOSAL; from all members
        self._mine: dict[int, bytes] = {}

    def reset(self) -> None:
        """Forget all values: another step begins, or the same one again."""
        self.told, self._mine = {}, {}

    def put(self, place: int, value: bytes) -> None:
        """Record this worker's value for a place."""
        self._mine[place] = value

    def put_report(self, vrank: int, told: bytes) -> None:
        """Record the encoded report of this worker's task, which may be empty."""
        self._mine.pop(vrank, None)
        if told:
            self._mine[vrank] = told

    def own_values(self, places: Iterable[int]) -> dict[int, bytes]:
        """Return this worker's values for those of these places that have one."""
        return {place: self._mine[place] for place in places if place in self._mine}

    def encode(self) -> bytes:
        """Return the values of all members, for `receive`; b"" if there are none.

        All members return the same bytes: pieces of a kept step are made by different ones.
        """
        return msgspec.msgpack.encode(dict(sorted(self.told.items()))) if self.told else b""

    def receive(self, data: bytes | memoryview) -> None:
        """Take in the values of all members, or of one member. Aborted."""
        try:
            self.told |= _decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise Aborted(f"values that cannot be read have come: {error}") from None


class ValuesGather:
    """Spreads the values of all members; most steps have none, and then it sends nothing.

    A member sends at most one message in each of log2 N turns, with all values that it has by then,
    and receives the values of each member once. The members' rows, which are gathered with it, say
    how many bytes each of them has. `counts`: False if the results of this member's tasks are
    dropped.
    """

    def __init__(self, values: StepValues, layout: Layout, view: View, *, counts: bool) -> None:
        places = list(layout.hosted[layout.rank]) if counts else []
        if view.workers[layout.rank] == view.leader:
            places.append(PROPOSAL)
        values.told = mine = values.own_values(places)
        self._values = values
        self._layout = layout
        self._mine = msgspec.msgpack.encode(mine) if mine else b""
        self.size = len(self._mine)  # how many bytes of values this member has
        self._sizes: Mapping[int, int] = {}  # by rank
        # The values of all members, and where each member's start, from this member's own on.
        self._room = torch.empty(0, dtype=torch.uint8)
        self._starts: list[int] = []
        self._turn = 0
        self._coming: list[Pending | None] = []  # by turn
        self._given: list[Pending] = []

    def expect(self, sizes: Mapping[int, int]) -> None:
        """Expect these numbers of bytes by rank; the mapping fills as rows come."""
        self._sizes = sizes

    def begin(self, transport: Transport) -> None:
        return

    def is_ready(self) -> bool:
        return not self._coming or is_done(self._coming[self._turn])

    def advance(self, transport: Transport) -> bool:
        """Spread the values once all sizes are known. Aborted."""
        if not self._starts:
            if len(self._sizes) < self._layout.size:
                return True
            self._make_room()
            self._coming = [self._begin_receive(transport, each) for each in self._layout.turns]
        else:
            if (pending := self._coming[self._turn]) is not None:
                pending.wait()
            self._turn += 1
        if self._turn == len(self._coming):
            return False
        turn = self._layout.turns[self._turn]
        held = self._part(0, turn.records)
        if len(held):
            self._given.append(transport.exchange([(turn.give_to, held)], [], TAG_VALUES))
        return True

    def finish(self) -> None:
        """Take in the values of all members. Aborted."""
        for pending in self._given:
            pending.wait()
        for i in range(1, self._layout.size):
            self._values.receive(self._part(i, i + 1).numpy().data)

    def _make_room(self) -> None:
        """Make room for the values of all members. Aborted for sizes that cannot be."""
        size = self._layout.size
        if any(not 0 <= each <= VALUES_BYTES_MAX for each in self._sizes.values()):
            raise Aborted(f"values of impossible sizes were announced: {dict(self._sizes)}")
        ranks = [(self._layout.rank + i) % size for i in range(size)]
        self._starts = [0, *itertools.accumulate(self._sizes[rank] for rank in ranks)]
        self._room = torch.empty(self._starts[-1], dtype=torch.uint8)
        self._room.numpy()[: self.size] = np.frombuffer(self._mine, np.uint8)
        self._mine = b""

    def _begin_receive(self, transport: Transport, turn: Turn) -> Pending | None:
        """Expect the message of a turn, before it comes; None if it has no values."""
        come = self._part(turn.distance, turn.distance + turn.records)
        return transport.exchange([], [(turn.get_from, come)], TAG_VALUES) if len(come) else None

    def _part(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of the members from the `start`-th after this one on."""
        return self._room[self._starts[start] : self._starts[stop]]
