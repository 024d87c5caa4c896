"""Keeps how far a script's data have been used: a part of the job's state.

Streams, samplers and datasets of the script are numbered in the order in which it makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.train.data.order_plan import OrderPosition
from holdfast.train.data.shard_positions import Position

KEPT = frozenset({"streams", "readers", "orders", "quarantined"})
PACKED = "packed"  # older releases have not saved it


class DataPlaces:
    """Keeps the positions in all data, and the records that all workers leave out."""

    def __init__(self) -> None:
        # How an epoch's last samples are shared out, as SamplePlan says; a job keeps its way.
        self.packed = True
        self.streams: dict[int, list[Position]] = {}  # positions of the streams' shards
        # the last reported states of the streams' readers
        self.readers: dict[int, dict[int, tuple[int, int, bytes]]] = {}
        self.orders: dict[int, list[OrderPosition]] = {}  # positions in the samplers' orders
        # by dataset: records and the steps in which they were found
        self.quarantined: dict[int, dict[int, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything, in plain values."""
        return {
            PACKED: self.packed,
            "streams": {number: list(found) for number, found in self.streams.items()},
            "readers": {number: dict(sorted(r.items())) for number, r in self.readers.items()},
            "orders": {number: list(found) for number, found in self.orders.items()},
            "quarantined": {number: dict(found) for number, found in self.quarantined.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's positions; the script's data keep the same lists."""
        self.packed = state.get(PACKED, False)
        for number, positions in state["streams"].items():
            self.streams.setdefault(number, [])[:] = positions
        for number, readers in state["readers"].items():
            known = self.readers.setdefault(number, {})
            known.clear()
            known.update(readers)
        for number, order in state["orders"].items():
            self.orders.setdefault(number, [])[:] = order
        for number in {*self.quarantined, *state["quarantined"]}:
            mine = self.quarantined.setdefault(number, {})
            mine.clear()
            mine.update(state["quarantined"].get(number, {}))
