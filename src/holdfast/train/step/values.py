"""Tells all members what tasks have come to besides gradients, or what the leader proposes.

It is what a step of kind VALUES exchanges: bytes, by virtual rank or as the leader's. With a step
of gradients the reports of its tasks travel in the same way. Nothing is summed here: who hears them
all does that, in the order of virtual ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from holdfast.core.errors import Aborted
from holdfast.core.types import View
from holdfast.train.exchange.layout import TAG_VALUES, Layout
from holdfast.train.exchange.seam import Message, Pending, Transport

PROPOSAL = -1  # the place of what the leader proposes, beside the virtual ranks
VALUES_BYTES_MAX = 1 << 32  # that a member may send in a step
_decode = msgspec.msgpack.Decoder(dict[int, bytes]).decode


class StepValues:
    """Holds the values of the open step. Used with the monitor held."""

    def __init__(self) -> None:
        self.told: dict[int, bytes] = {}  # by virtual rank, or PROPOSAL; of all members
        self._mine: dict[int, bytes] = {}

    def reset(self) -> None:
        """Forget all values: another step begins, or the same one anew."""
        self.told, self._mine = {}, {}

    def put(self, place: int, value: bytes) -> None:
        """Note what this worker says at a place."""
        self._mine[place] = value

    def put_report(self, vrank: int, told: bytes) -> None:
        """Note the encoded report of this worker's task, which may be nothing."""
        self._mine.pop(vrank, None)
        if told:
            self._mine[vrank] = told

    def mine(self, places: Iterable[int]) -> dict[int, bytes]:
        """Return what this worker says at those of these places where it says anything."""
        return {place: self._mine[place] for place in places if place in self._mine}

    def encoded(self) -> bytes:
        """Return the values of all members, as `receive` takes them; b"" if there are none.

        All members return the same bytes: pieces of a kept step are made by different ones.
        """
        return msgspec.msgpack.encode(dict(sorted(self.told.items()))) if self.told else b""

    def receive(self, data: bytes) -> None:
        """Take in what others have heard of all members, or what one member says. Aborted."""
        try:
            self.told |= _decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise Aborted(f"values that cannot be read have come: {error}") from None


class ValuesGather:
    """Gathers the values of all members; most steps have none, and then it sends nothing.

    The members' rows, which are gathered with it, say how many bytes each of them sends. `counts`:
    False if what this member's tasks have come to is dropped.
    """

    def __init__(self, values: StepValues, layout: Layout, view: View, *, counts: bool) -> None:
        places = list(layout.hosted[layout.rank]) if counts else []
        if view.workers[layout.rank] == view.leader:
            places.append(PROPOSAL)
        values.told = mine = values.mine(places)
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
        """Expect so many bytes of each rank, once `spread` is called: filled in until then."""
        self._sizes = sizes

    def gather(self, transport: Transport) -> None:
        return

    def spread(self, transport: Transport) -> None:
        """Send and receive the values themselves, now that all sizes are known. Aborted."""
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

    def finish(self) -> None:
        """Take in what all members have said. Aborted."""
        if self._pending is not None:
            self._pending.wait()
        for _, message in self._messages:
            self._values.receive(message.numpy().tobytes())
