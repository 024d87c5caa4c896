"""Carries module attributes besides parameters and persistent buffers, and guards them in tasks.

Plain attributes (numbers, strings, flags, lists of them, tensors), modes (`training`) and
non-persistent buffers of protected modules are a part of the job's state as soon as they change. A
task's changes of attributes are undone before the next task begins, so that a task stays a pure
function, on whatever worker, and after whatever other tasks. So are changes of the items of small
lists, sets, dictionaries and deques of numbers, strings and tensors; but not of dictionaries of
tensors, which are often mere caches. Must not know steps or views.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from holdfast.engine.train.exchange.tensor_bytes import as_bytes

ITEMS_MAX = 1000  # items of a list or dictionary that are compared
_SCALARS = (type(None), bool, int, float, str, bytes)
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()


@dataclass(slots=True)
class _Seen:
    """Is an attribute's value when it was first seen."""

    value: Any
    #: Version counter of a tensor.
    version: int


@dataclass(frozen=True, slots=True)
class _Change:
    """Records a task's change of an attribute."""

    #: The attributes of one module.
    attributes: dict[str, Any]
    name: str
    #: _ABSENT if the attribute is new.
    before: Any
    after: Any

    def undo(self) -> None:
        """Restore the value, unless other code has changed it since then."""
        if self.attributes.get(self.name, _ABSENT) is self.after:
            if self.before is _ABSENT:
                del self.attributes[self.name]
            else:
                self.attributes[self.name] = self.before


@dataclass(slots=True)
class _Held:
    """Keeps a container of a module, with its items at the step's beginning and after a task."""

    path: str
    container: Any
    before: list[Any]
    #: None: the last task has not changed the items.
    after: list[Any] | None = None

    def undo(self) -> None:
        """Restore the items, unless other code has changed them since then."""
        if self.after is not None and _are_same(_items(self.container), self.after):
            self.container.clear()
            if isinstance(self.container, dict | set):
                self.container.update(self.before)
            else:
                self.container.extend(self.before)
        self.after = None


class ModuleAttributes:
    """Tracks the attributes of all protected modules; `modules`: with their names.

    `log(path)` is called once for each attribute that a task has changed.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        log: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._protected = list(modules)
        self._log = log
        self._first: dict[str, _Seen] = {}  # by path, as the script has made them
        self._first_buffers: dict[str, int] = {}  # digests of the buffers, by path
        # paths that have ever changed: these stay in the state for ever
        self._changed: set[str] = set()
        self._guarded: list[tuple[str, dict[str, Any]]] = []  # modules whose tasks may change them
        # attributes of each guarded module at the step's beginning
        self._start: list[dict[str, Any]] = []
        self._held: list[_Held] = []  # their lists and other containers
        self._left: list[_Change] = []  # changes by the last task
        self._told: set[str] = set()

    def begin(self) -> None:
        """Record the modules as the script has made them: only later changes become state."""
        for path, value, owner in self._attributes():
            if isinstance(owner, nn.Module):
                self._first_buffers[path] = _fingerprint(value)
            else:
                self._first[path] = _remember(value)

    # ------------------------------------------------------------ the job's state

    def state_dict(self) -> dict[str, Any]:
        """Return the values that have ever changed, by path; tensors stay tensors."""
        self._undo()
        buffers: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        for path, value, owner in self._attributes():
            if path in self._changed or not self._is_as_made(path, value, owner):
                self._changed.add(path)
                found = buffers if isinstance(owner, nn.Module) else changed
                found[path] = value.detach() if isinstance(value, torch.Tensor) else value
        return {"attributes": changed, "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another worker's attributes; all other ones return to their first values."""
        self._undo()
        modules = dict(self._modules())
        for path, value, owner in list(self._attributes()):
            name = path.rpartition(".")[2]
            if isinstance(owner, nn.Module):
                owner._buffers[name] = _copy_to_device_of(state["buffers"].get(path, value), value)
            elif path in self._first and path not in state["attributes"]:
                owner[name] = self._first[path].value
        for path, value in state["attributes"].items():
            parent, _, name = path.rpartition(".")
            if parent in modules:
                attributes = vars(modules[parent])
                attributes[name] = _copy_to_device_of(value, attributes.get(name))
        self._changed = {*state["attributes"], *state["buffers"]}

    def _is_as_made(self, path: str, value: Any, owner: dict[str, Any] | nn.Module) -> bool:
        if isinstance(owner, nn.Module):
            return self._first_buffers.get(path) == _fingerprint(value)
        return _is_same(self._first.get(path), value)

    def plain_attributes(self) -> dict[str, Any]:
        """Return the changed attributes in plain values, to compare them between workers."""
        found = self.state_dict()["attributes"]
        return {path: _describe(value) for path, value in found.items()}

    # ------------------------------------------------------------ within a step

    def begin_step(self, *, looks: bool = True) -> None:
        """Record the attributes with which the tasks of a step begin.

        `looks`: look for added modules, too.
        """
        self._undo()
        if looks or not self._guarded:
            self._guarded = [
                (path, vars(module))
                for path, module in self._modules()
                if not type(module).__module__.startswith("torch.")
            ]
        self._start = [attributes.copy() for _, attributes in self._guarded]
        self._held = [
            _Held(f"{path}.{name}", value, _items(value))
            for path, attributes in self._guarded
            for name, value in attributes.items()
            if name not in _INTERNAL and _is_set_back(value)
        ]

    def begin_task(self) -> None:
        """Undo the changes of the task before."""
        self._undo()

    def end_task(self) -> None:
        """Find the changes made by the task."""
        for (path, now), start in zip(self._guarded, self._start, strict=True):
            if len(now) == len(start) and all(map(operator.is_, now.values(), start.values())):
                continue
            for name, value in now.items():
                before = start.get(name, _ABSENT)
                if before is value or name in _INTERNAL or name in _find_derived(now):
                    continue
                if not (_is_carried(value) and (before is _ABSENT or _is_carried(before))):
                    continue
                self._left.append(_Change(now, name, before, value))
                if name != "training" and _has_changed(before, value):
                    self._note(f"{path}.{name}")

        for held in self._held:
            items = _items(held.container)
            if not _are_same(items, held.before):
                held.after = items
                self._note(held.path)

    def _note(self, path: str) -> None:
        if path not in self._told:
            self._told.add(path)
            self._log(path)

    def _undo(self) -> None:
        for change in self._left:
            change.undo()
        self._left = []
        for held in self._held:
            held.undo()

    # ------------------------------------------------------------ leaves

    def _modules(self) -> Iterable[tuple[str, nn.Module]]:
        for name, module in self._protected:
            yield from module.named_modules(prefix=name)

    def _attributes(self) -> Iterable[tuple[str, Any, dict[str, Any] | nn.Module]]:
        """Walk over (path, value, owner): a module for its buffers, else its dictionary."""
        for path, module in self._modules():
            attributes = vars(module)
            derived = _find_derived(attributes)
            for name, value in attributes.items():
                if name not in _INTERNAL and name not in derived and _is_carried(value):
                    yield f"{path}.{name}", value, attributes
            for name in sorted(module._non_persistent_buffers_set):
                if (buffer := module._buffers.get(name)) is not None:
                    yield f"{path}.{name}", buffer, module


def _find_derived(attributes: Mapping[str, Any]) -> set[str]:
    """Return the attributes that a module's hooks compute from parameters before each forward pass.

    That is how pruning, and the weight and spectral norms of torch.nn.utils, keep weights.
    """
    hooks = attributes["_forward_pre_hooks"].values()
    names = (getattr(each, "name", getattr(each, "_tensor_name", None)) for each in hooks)
    return {name for name in names if isinstance(name, str)}


def _remember(value: Any) -> _Seen:
    if isinstance(value, torch.Tensor):
        return _Seen(value, value._version)
    return _Seen(_copy(value), 0)


def _is_same(seen: _Seen | None, value: Any) -> bool:
    if seen is None:
        return False
    if isinstance(value, torch.Tensor):
        return seen.value is value and seen.version == value._version
    return not _has_changed(seen.value, value)


def _has_changed(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return before is not after
    return type(before) is not type(after) or (before != after and repr(before) != repr(after))


def _is_carried(value: Any) -> bool:
    if type(value) in _SCALARS:
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and value.layout == torch.strided
    if type(value) in (list, tuple, set):
        return len(value) <= ITEMS_MAX and all(type(each) in _SCALARS for each in value)
    if type(value) is dict:
        items = (*value.keys(), *value.values())
        return len(items) <= ITEMS_MAX and all(type(each) in _SCALARS for each in items)
    return False


def _is_set_back(value: Any) -> bool:
    """Return whether changes of this value's items by a task are undone."""
    if type(value) not in (list, deque, set, dict) or len(value) > ITEMS_MAX:
        return False
    if type(value) is dict:
        return _is_carried(value)
    return all(type(each) in _SCALARS or type(each) is torch.Tensor for each in value)


def _items(container: Any) -> list[Any]:
    """Return the items, as pairs for a dictionary; at most one more than ITEMS_MAX."""
    items = container.items() if isinstance(container, dict) else container
    return list(itertools.islice(items, ITEMS_MAX + 1))


def _are_same(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    return all(
        a is b or (type(a) is tuple and type(b) is tuple and a == b)
        for a, b in zip(one, other, strict=True)
    )


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else value


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return f"a tensor {list(value.shape)} of {value.dtype} with digest {_fingerprint(value):x}"


def _fingerprint(value: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bytes(value).numpy().data)


def _copy_to_device_of(value: Any, present: Any) -> Any:
    """Return `value`, on the device of `present`."""
    if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
        return value.detach().clone().to(present.device)
    return value.detach().clone() if isinstance(value, torch.Tensor) else _copy(value)
