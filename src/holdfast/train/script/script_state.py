"""Keeps the position of the job's script, and its values: a part of the job's state.

It travels with the protected objects. So a worker that joins, or begins from a checkpoint, knows
which loops of its script are over, which step of the present one comes next, and which values all
workers have exchanged between loops.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from holdfast.core.errors import StateMismatch, UserError
from holdfast.train.checkpoint.state import to_plain
from holdfast.train.data.order_plan import OrderPosition
from holdfast.train.data.shard_positions import Position
from holdfast.train.script.rank_states import RankStates
from holdfast.train.script.row_updates import RowUpdates
from holdfast.train.step.module_attributes import ModuleAttributes
from holdfast.train.step.trained import TrainedParameters

PLACES = frozenset({"streams", "readers", "orders", "quarantined"})  # entries for positions in data
KEPT = PLACES | {"steps", "stopped", "values", "ended", "told", "epoch", "modules", "trained"}
RANK_STATES = "rank_states"  # saved by jobs that have any
EpochEntry = tuple[int, int, list[bytes]]


class Values(MutableMapping[str, Any]):
    """Keeps the script's variables: numbers, strings, and lists and dictionaries of them.

    It is a part of the job's state: it is saved, and a worker that joins receives it.
    """

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise UserError(f"job.values[{name!r}]: give a string as the name")
        to_plain(value, f"job.values[{name!r}]")
        self._items[name] = value

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Values({self._items!r})"


class ScriptState:
    """Counts a script's steps and finished loops; protected like a model. See the module."""

    def __init__(self) -> None:
        self.steps = 0  # steps of the script so far, over all its loops
        self.stopped = False  # the script's loops are to end
        self.values = Values()
        self.scratch: dict[str, Any] = {}  # the script's own, and no part of the state
        # for each finished loop, the number of steps after which it ended
        self.ended: list[int] = []
        self.streams: dict[int, list[Position]] = {}  # positions of the streams' shards
        self.trained = TrainedParameters()
        # the last reported states of the streams' readers
        self.readers: dict[int, dict[int, tuple[int, int, bytes]]] = {}
        self.orders: dict[int, list[OrderPosition]] = {}  # positions in the samplers' orders
        # by dataset: records and the steps in which they were found
        self.quarantined: dict[int, dict[int, int]] = {}
        self.told: dict[int, bytes] = {}  # values exchanged between loops: by number of the loop
        # The newest epoch: the number of its loop, its own number, and the values that workers
        # have exchanged in it before its first step.
        self.epoch: EpochEntry = (-1, -1, [])
        self.attributes = ModuleAttributes([])  # filled in once the protected modules are known
        self.rank_states = RankStates()
        self.row_updates = RowUpdates()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything, in plain values."""
        values = {name: to_plain(v, f"job.values[{name!r}]") for name, v in self.values.items()}
        rank_states = self.rank_states.state_dict()
        return {
            "steps": self.steps,
            "stopped": self.stopped,
            "values": values,
            "ended": list(self.ended),
            "streams": {number: list(found) for number, found in self.streams.items()},
            "readers": {number: dict(sorted(r.items())) for number, r in self.readers.items()},
            "orders": {number: list(found) for number, found in self.orders.items()},
            "quarantined": {number: dict(found) for number, found in self.quarantined.items()},
            "told": dict(self.told),
            "epoch": [self.epoch[0], self.epoch[1], list(self.epoch[2])],
            "modules": self.attributes.state_dict(),
            "trained": self.trained.state_dict(),
            **({RANK_STATES: rank_states} if rank_states else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's position and values; StateMismatch if they are of another version."""
        if set(state) - {RANK_STATES} != KEPT:
            raise StateMismatch(
                f"the script's progress is kept as {sorted(state)}, which this version of Holdfast "
                "does not know: use the version that saved it"
            )
        self.steps, self.stopped = state["steps"], state["stopped"]
        self.ended, self.told = list(state["ended"]), dict(state["told"])
        loop, epoch, told = state["epoch"]
        self.epoch = loop, epoch, list(told)
        self.attributes.load_state_dict(state["modules"])
        self.trained.load_state_dict(state["trained"])
        self.rank_states.load_state_dict(state.get(RANK_STATES, {}))
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
        for name in list(self.values):
            del self.values[name]
        self.values.update(copy.deepcopy(dict(state["values"])))
