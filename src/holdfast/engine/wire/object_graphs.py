"""Writes a graph of the core's objects as bytes, and makes it again from them.

It knows plain values, containers, enums, and objects of classes under holdfast.engine.core, whose
attributes it sets without calling any of their code. An object that stands in several places is one
object again.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import re
import types
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from holdfast.engine.core.errors import Damaged

ROOM = "holdfast.engine.core."
_CLASS = re.compile(r"[a-z_.]+:[A-Za-z_]+", re.ASCII)
_PLAIN = (type(None), bool, float, str, bytes)
_UNSET = object()
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_PROXY, _DICT, _OBJECT, _NAMED_TUPLE, _ENUM, _FRESH, _AGAIN, _LARGE = "pdomenri"
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_MADE: dict[str, type] = {tag: kind for kind, tag in _SEQUENCES.items()}


def dump_graph(root: object, fresh: Collection[type] = ()) -> bytes:
    """Return the bytes of a graph.

    `fresh`: classes, such as caches, whose objects are replaced by new ones. Cached properties are
    left out.
    TypeError if the graph has a value of an unknown kind.
    """
    return msgspec.msgpack.encode(_Writer(fresh).write(root))


def load_graph(data: bytes, fresh: Collection[type] = ()) -> Any:
    """Make a graph from its bytes. Damaged: they describe none."""
    was_on = gc.isenabled()
    # Else the collector examines the new objects again and again: seconds for millions of them.
    gc.disable()
    try:
        return _Reader(fresh).read(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise Damaged(f"no graph of objects: {error}") from None
    except (IndexError, ImportError, RecursionError) as error:
        raise Damaged(f"no graph of objects: {error!r}") from None
    finally:
        if was_on:
            gc.enable()


class _Writer:
    def __init__(self, fresh: Collection[type]) -> None:
        self._fresh = fresh
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is used twice
        self._kinds: dict[type, tuple[str, tuple[str, ...]]] = {}

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else [_LARGE, str(value)]
        if isinstance(value, enum.Enum):
            return [_ENUM, self._describe(kind)[0], value.name]
        if (number := self._numbers.get(id(value))) is not None:
            return [_AGAIN, number]
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        if tag := _SEQUENCES.get(kind):
            return [tag, *map(self.write, value)]
        if kind is dict:
            return [_DICT, *(self.write(each) for pair in value.items() for each in pair)]
        if kind is types.MappingProxyType:
            (inner,) = gc.get_referents(value)
            return [_PROXY, self.write(inner)]
        name, slots = self._describe(kind)
        if kind in self._fresh:
            return [_FRESH, name]
        if isinstance(value, tuple):
            return [_NAMED_TUPLE, name, *map(self.write, value)]
        found = [_OBJECT, name]
        for slot in slots:
            if (part := getattr(value, slot, _UNSET)) is not _UNSET:
                found += (slot, self.write(part))
        for attribute, part in getattr(value, "__dict__", {}).items():
            if not isinstance(getattr(kind, attribute, None), functools.cached_property):
                found += (attribute, self.write(part))
        return found

    def _describe(self, kind: type) -> tuple[str, tuple[str, ...]]:
        """Return the name of a class and the names in its slots. TypeError if it is not core's."""
        if (found := self._kinds.get(kind)) is None:
            found = self._kinds[kind] = _name_of(kind), _slots_of(kind)
        return found


class _Reader:
    def __init__(self, fresh: Collection[type]) -> None:
        self._fresh = fresh
        self._made: list[object] = []
        self._ready: list[bool] = []

    def read(self, form: Any) -> Any:
        if not isinstance(form, list):
            return form
        tag, *rest = form
        if tag == _LARGE:
            return _large(rest[0])
        if tag == _ENUM:
            return _enum_of(rest[0])[rest[1]]
        if tag == _AGAIN:
            if not self._ready[rest[0]]:
                raise ValueError("a value that cannot change contains itself")
            return self._made[rest[0]]
        number = len(self._made)
        shell = self._shell(tag, rest)
        self._made.append(shell)
        self._ready.append(shell is not None)
        if shell is None:
            shell = self._made[number] = self._complete(tag, rest)
            self._ready[number] = True
        else:
            self._fill(shell, tag, rest)
        return shell

    def _shell(self, tag: str, rest: list[Any]) -> Any:
        """Return an empty object that is filled later; None: it must be made whole."""
        if tag in (_DICT, "l", "s"):
            return {} if tag == _DICT else _MADE[tag]()
        if tag == _OBJECT:
            found = _class_of(rest[0])
            if issubclass(found, enum.Enum):
                raise ValueError(f"no {rest[0]} can be made")
            return object.__new__(found)
        if tag == _FRESH:
            found = _class_of(rest[0])
            if found not in self._fresh:
                raise ValueError(f"{rest[0]} cannot be made without its fields")
            return found()
        return None

    def _fill(self, shell: Any, tag: str, rest: list[Any]) -> None:
        if tag == _OBJECT:
            for name, form in zip(rest[1::2], rest[2::2], strict=True):
                if not isinstance(name, str) or name.startswith("__"):
                    raise ValueError(f"{name!r} is no attribute")
                object.__setattr__(shell, name, self.read(form))
        elif tag == _DICT:
            for key, form in zip(rest[::2], rest[1::2], strict=True):
                found = self.read(key)  # first: values are numbered in the order of their writing
                shell[found] = self.read(form)
        elif tag == "l":
            shell.extend(map(self.read, rest))
        elif tag == "s":
            shell.update(map(self.read, rest))

    def _complete(self, tag: str, rest: list[Any]) -> object:
        if tag == _PROXY:
            return types.MappingProxyType(self.read(rest[0]))
        if tag == _NAMED_TUPLE:
            return tuple.__new__(_class_of(rest[0], tuple), map(self.read, rest[1:]))
        return _MADE[tag](map(self.read, rest))


def _large(digits: object) -> int:
    if not isinstance(digits, str):
        raise ValueError(f"{digits!r} is no text of digits")
    return int(digits)


def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the names in the slots of a class and of its base classes."""
    found: list[str] = []
    for each in kind.__mro__:
        names = each.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(name for name in found if not name.startswith("__"))


def _name_of(kind: type) -> str:
    if not kind.__module__.startswith(ROOM) or issubclass(kind, BaseException):
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be written")
    return f"{kind.__module__.removeprefix(ROOM)}:{kind.__qualname__}"


def _enum_of(name: str) -> Mapping[str, enum.Enum]:
    found: Mapping[str, enum.Enum] = vars(_class_of(name, enum.Enum))["_member_map_"]
    return found


def _class_of(name: str, base: type = object) -> type:
    if _CLASS.fullmatch(name) is None:
        raise ValueError(f"{name!r} names no class")
    module, _, title = name.partition(":")
    found = vars(importlib.import_module(ROOM + module)).get(title)
    if not isinstance(found, type) or found.__module__ != ROOM + module:
        raise ValueError(f"{name} is no class of its module")
    if not issubclass(found, base):
        raise ValueError(f"{name} is no {base.__name__}")
    return found
