"""Keeps how far a script's data have been used, and which data the job has begun with.

Streams, samplers and datasets of the script are numbered in the order in which it makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.train.data.data_facts import Facts, find_difference
from holdfast.engine.train.data.order_plan import OrderPosition
from holdfast.engine.train.data.shard_positions import Position
from holdfast.engine.train.step.state_differences import SAME_DATA

KEPT = frozenset({"streams", "readers", "orders", "quarantined"})
PACKED = "packed"  # older releases have not saved it
FACTS = "data"  # saved by jobs with loops over data


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
        # by the number of a loop: the description of its data with which the job has begun it
        self._facts: dict[int, Facts] = {}

    def compare(self, loop: int, mine: Facts, worker: int) -> tuple[str, str]:
        """Compare a loop's data with those with which the job has begun it.

        Return the name of what differs, and a sentence for people; both are "" if nothing does.
        """
        theirs = self._facts.setdefault(loop, dict(mine)) if mine else {}
        if not (name := find_difference(mine, theirs)):
            return "", ""
        return name, (
            f"{name} is {mine[name]} on worker {worker}, and was {theirs[name]} when the job began "
            f"with these data: {SAME_DATA}; to train on other data, begin another job with "
            "job.begin_from(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything, in plain values."""
        facts = {loop: dict(found) for loop, found in self._facts.items()}
        return {
            PACKED: self.packed,
            "streams": {number: list(found) for number, found in self.streams.items()},
            "readers": {number: dict(sorted(r.items())) for number, r in self.readers.items()},
            "orders": {number: list(found) for number, found in self.orders.items()},
            "quarantined": {number: dict(found) for number, found in self.quarantined.items()},
            **({FACTS: facts} if facts else {}),
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
        self._facts = {loop: dict(found) for loop, found in state.get(FACTS, {}).items()}
