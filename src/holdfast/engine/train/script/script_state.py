"""Keeps the script's part of the job's state: its position, its values, and its places in the data.

It travels with the protected objects. So a worker that joins, or begins from a checkpoint, knows
which loops of its script are over, which step of the present one comes next, and which values all
workers have exchanged between loops. Streams, samplers and datasets of the script are numbered in
the order in which it makes them.

A value of `job.values` must come back from a checkpoint, or from another worker, as the script has
stored it, type for type; other values are refused. The settings with which the script began are
kept as well, because a job that continues from a checkpoint has the rates, schedules and flags of
its state, even if the script has been edited since.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from holdfast.engine.core.errors import StateMismatch, UserError
from holdfast.engine.train.checkpoint.state import is_scalar_of_numpy, kind_of_dict
from holdfast.engine.train.data.read_plans import OrderPosition, Position
from holdfast.engine.train.data.sample_digest import Facts, find_difference
from holdfast.engine.train.script.rank_states import RankStates
from holdfast.engine.train.script.row_updates import RowUpdates
from holdfast.engine.train.script.service_link import HostedService
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.state_differences import SAME_DATA
from holdfast.engine.train.step.trained import TrainedParameters

_SCALARS = (type(None), bool, int, float, str, bytes)
POSITIONS = frozenset({"streams", "readers", "orders", "quarantined"})
PACKED = "packed"  # older releases have not saved it
FACTS = "data"  # saved by jobs with loops over data
SETTINGS_MAX = 1000  # settings that are kept
NAMED_MAX = 3  # changed settings that are named
_MISSING = "missing"
KEPT = POSITIONS | {
    "steps",
    "stopped",
    "values",
    "ended",
    "told",
    "epoch",
    "modules",
    "trained",
}
RANK_STATES = "rank_states"  # saved by jobs that have any
SETTINGS = "settings"  # older releases have not saved them
EpochEntry = tuple[int, int, list[bytes]]


class Values(MutableMapping[str, Any]):
    """Keeps the script's variables: numbers, strings, tuples, lists and dictionaries of them.

    It is a part of the job's state: it is saved, and a worker that joins receives it.
    """

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise UserError(f"job.values[{name!r}]: give a string as the name")
        _check(value, f"job.values[{name!r}]")
        self._items[name] = value

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Values({self._items!r})"

    def check(self) -> None:
        """Check all values, because the script may have changed lists in place. UserError."""
        for name, value in self._items.items():
            _check(value, f"job.values[{name!r}]")

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all values. UserError for a value that would come back changed."""
        self.check()
        return copy.deepcopy(self._items)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over other values; lists and dictionaries that the script holds stay the same."""
        _fill(self._items, copy.deepcopy(dict(state)))


def _check(value: Any, name: str) -> None:
    """Raise UserError for a value that would come back as another one."""
    kind = type(value)
    if kind in _SCALARS or is_scalar_of_numpy(value):
        return
    if kind in (list, tuple):
        for i, each in enumerate(value):
            _check(each, f"{name}[{i}]")
    elif isinstance(value, dict) and kind_of_dict(value) is not None:
        for key, each in value.items():
            _check(key, f"the key {key!r} of {name}")
            _check(each, f"{name}[{key!r}]")
    else:
        raise UserError(f"{name} is a {kind.__module__}.{kind.__qualname__}{_advice(value)}")


def _advice(value: Any) -> str:
    """Return advice on storing a value of this type."""
    if isinstance(value, collections.defaultdict):
        return (
            " whose default is a function of the script, which cannot be kept: give "
            "collections.defaultdict(int), or another of Python's own types"
        )
    for plain in (dict, tuple, list, int, float, str, bytes):
        if isinstance(value, plain):
            name = plain.__name__
            return f", which would come back as a plain {name}: give {name}(value)"
    return (
        ": give numbers, strings, or tuples, lists and dictionaries of them (value.item() makes a "
        "number of a tensor or an array)"
    )


def _fill(held: dict[Any, Any], given: Mapping[Any, Any]) -> None:
    """Give a dictionary other items; a list or dictionary that stays is filled, not replaced."""
    before = dict(held)
    held.clear()
    for key, value in given.items():
        mine: Any = before.get(key)
        held[key] = mine if type(mine) is type(value) and isinstance(value, list | dict) else value
        if held[key] is value:
            continue
        if isinstance(value, list):
            mine[:] = value
        else:
            if isinstance(value, collections.defaultdict):
                mine.default_factory = value.default_factory
            _fill(mine, value)


class DataPlaces:
    """Keeps the positions in all data, and the records that all workers leave out."""

    def __init__(self) -> None:
        #: The way to share out an epoch's last samples, as in SamplePlan; a job keeps it.
        self.packed = True
        #: Positions of the streams' shards.
        self.streams: dict[int, list[Position]] = {}
        # the last reported states of the streams' readers
        self.readers: dict[int, dict[int, tuple[int, int, bytes]]] = {}
        #: Positions in the samplers' orders.
        self.orders: dict[int, list[OrderPosition]] = {}
        # by dataset: records and the steps in which they were found
        self.quarantined: dict[int, dict[int, int]] = {}
        # by the number of a loop: the description of its data with which the job has begun it
        self._facts: dict[int, Facts] = {}

    def compare(self, loop: int, mine: Facts, worker: int) -> tuple[str, str]:
        """Compare a loop's data with those with which the job has begun it.

        Return the name of what differs, and a sentence for people; both are "" if there is no
        difference.
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


class MadeSettings:
    """Keeps the plain values of protected objects, as the script has made them; job state."""

    def __init__(self) -> None:
        #: By path: in the job, and in this script.
        self.changed: dict[str, tuple[str, str]] = {}
        self._made: dict[str, str] = {}

    def begin(self, items: Mapping[str, str]) -> None:
        """Keep the values that the script has made, by their paths."""
        self._made = dict(list(items.items())[:SETTINGS_MAX])

    def state_dict(self) -> dict[str, str]:
        """Return the values with which the job began."""
        return dict(self._made)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Take over the values with which the job began, and find the ones that differ here."""
        if not state:  # an older release has saved none
            return
        for path in {**state, **self._made}:
            pair = state.get(path, _MISSING), self._made.get(path, _MISSING)
            if pair[0] != pair[1]:
                self.changed[path] = pair
        self._made = dict(state)

    def describe_changed(self) -> str:
        """Return a sentence on the settings that the script has changed; empty: it has not."""
        if not self.changed:
            return ""
        told = [f"{p} ({was} before, {now} now)" for p, (was, now) in self.changed.items()]
        more = len(told) - NAMED_MAX
        named = ", ".join(told[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        return (
            f"the script has changed since the job began: {named}. The job goes on with the values "
            "in its state; to use others, set them in the loop, from a step on (if step.index >= N)"
        )


class ScriptState:
    """Counts a script's steps and finished loops; protected like a model. See the module."""

    def __init__(self, rank_states: RankStates | None = None) -> None:
        #: Steps of the script so far, over all its loops.
        self.steps = 0
        #: The script's loops are to end.
        self.stopped = False
        self.values = Values()
        self.settings = MadeSettings()
        #: The script's own, and no part of the state.
        self.scratch: dict[str, Any] = {}
        # for each finished loop, the number of steps after which it ended
        self.ended: list[int] = []
        self.places = DataPlaces()
        self.trained = TrainedParameters()
        #: Values exchanged between loops: by number of the loop.
        self.told: dict[int, bytes] = {}
        # The newest epoch: the number of its loop, its own number, and the values that workers
        # have exchanged in it before its first step.
        self.epoch: EpochEntry = (-1, -1, [])
        #: Filled in once the protected modules are known.
        self.attributes = ModuleAttributes([])
        self.rank_states = rank_states or RankStates()
        self.row_updates = RowUpdates()
        self.service = HostedService()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything, in plain values."""
        rank_states = self.rank_states.state_dict()
        return {
            "steps": self.steps,
            "stopped": self.stopped,
            "values": self.values.state_dict(),
            "ended": list(self.ended),
            SETTINGS: self.settings.state_dict(),
            **self.places.state_dict(),
            "told": dict(self.told),
            "epoch": [self.epoch[0], self.epoch[1], list(self.epoch[2])],
            "modules": self.attributes.state_dict(),
            "trained": self.trained.state_dict(),
            **({RANK_STATES: rank_states} if rank_states else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's position and values; StateMismatch if they are of another version."""
        if set(state) - {RANK_STATES, SETTINGS, PACKED, FACTS} != KEPT:
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
        self.settings.load_state_dict(state.get(SETTINGS, {}))
        self.places.load_state_dict(state)
        self.values.load_state_dict(state["values"])
