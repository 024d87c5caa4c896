"""Sends all members the values of tasks besides gradients, or the leader's proposal.

A step of kind VALUES exchanges them: bytes, by virtual rank or as the leader's. In a step of
gradients the reports of its tasks travel in the same way. No sums are made here: each receiver
makes them, in the order of virtual ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from holdfast.core.errors import Aborted
from holdfast.core.types import View
from holdfast.train.exchange.layout import TAG_VALUES, Layout
from holdfast.train.exchange.seam import Message, Pending, Transport

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

    def receive(self, data: bytes) -> None:
        """Take in the values of all members, or of one member. Aborted."""
        try:
            self.told |= _decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise Aborted(f"values that cannot be read have come: {error}") from None


class ValuesGather:
    """Gathers the values of all members; most steps have none, and then it sends nothing.

    The members' rows, which are gathered with it, say how many bytes each of them sends. `counts`:
    False if the results of this member's tasks are dropped.
    """

    def __init__(self, values: StepValues, layout: Layout, view: View, *, counts: bool) -> None:
        places = list(layout.hosted[layout.rank]) if counts else []
        if view.workers[layout.rank] == view.leader:
            places.append(PROPOSAL)
        values.told = mine = values.own_values(places)
        self._values = values
        self._layout = layout
        self._mine = bytearray(msgspec.msgpack.encode(mine)) if mine else bytearray()
        self._sizes: Mapping[int, int] = {}  # by rank
        self._messages: list[Message] = []
        self._pending: Pending | None = None

    @property
    def size(self) -> int:
        """Return how many bytes this member sends."""
        return len(self._mine)

    def expect(self, sizes: Mapping[int, int]) -> None:
        """Expect these numbers of bytes by rank; the mapping fills as rows come."""
        self._sizes = sizes

    def begin(self, transport: Transport) -> None:
        return

    def is_ready(self) -> bool:
        return True

    def advance(self, transport: Transport) -> bool:
        """Send and receive the values themselves once all sizes are known. Aborted."""
        if len(self._sizes) < self._layout.size:
            return True
        sizes = {peer: self._sizes[peer] for peer in self._layout.others}
        if any(not 0 <= size <= VALUES_BYTES_MAX for size in sizes.values()):
            raise Aborted(f"values of impossible sizes were announced: {sizes}")
        self._messages = [(p, torch.empty(n, dtype=torch.uint8)) for p, n in sizes.items() if n]
        sends: list[Message] = []
        if self._mine:
            mine = torch.frombuffer(self._mine, dtype=torch.uint8)
            sends = [(peer, mine) for peer in sizes]
        if sends or self._messages:
            self._pending = transport.exchange(sends, self._messages, TAG_VALUES)
        return False

    def finish(self) -> None:
        """Take in the values of all members. Aborted."""
        if self._pending is not None:
            self._pending.wait()
        for _, message in self._messages:
            self._values.receive(message.numpy().tobytes())
