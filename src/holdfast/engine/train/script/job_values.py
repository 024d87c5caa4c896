"""Keeps the variables that a script shares over all workers: `job.values`.

They are a part of the job's state, so a value must come back from a checkpoint, or from another
worker, as the script has stored it, type for type. A value for which that is not so is refused.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.state import is_scalar_of_numpy, kind_of_dict

_SCALARS = (type(None), bool, int, float, str, bytes)


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
        """Return a copy of all values. UserError for one that would not come back as it is."""
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
