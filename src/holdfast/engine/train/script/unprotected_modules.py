"""Finds modules that a script changes step by step and has not protected: averages, targets.

A worker that joins would start them from scratch. In the first step it looks for every module of
the process, and for every dictionary of tensors by the names of a module's parameters; frozen ones
(teachers, feature extractors) do not change, and are not reported. Tensors in a protected object's
state, or copies of them, are not reported either. Nor are objects in the job's scratch, because no
result depends on these.
"""

from __future__ import annotations

import gc
import itertools
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.state import tensors_in
from holdfast.engine.train.step.table_parameters import AbsentWeight

TENSORS_MAX = 4  # tensors of a module that are compared
NUMBERS_MAX = 16  # numbers of each tensor that are compared
Numbers = tuple[str, ...]


class UnprotectedModules:
    """Watches the modules with parameters that are no part of the protected ones.

    `others`: protected objects that are no modules; tensors of their state are protected, too.
    `scratch`: the job's.
    """

    def __init__(
        self, others: Collection[Any] = (), scratch: Mapping[str, Any] | None = None
    ) -> None:
        self._others = others
        self._scratch: Mapping[str, Any] = {} if scratch is None else scratch
        self._found: list[tuple[weakref.ref[nn.Module], Numbers]] | None = None
        self._changed = 0  # how often in a row a module was seen to have changed
        # tables, their numbers, and how often in a row they changed
        self._tables: list[tuple[dict[str, Any], Numbers, int]] = []

    def look(self, protected: Collection[nn.Module]) -> None:
        """Compare the modules with their last contents. UserError if one has changed twice."""
        if self._found is None:
            kept = {t.data_ptr() for each in self._others for t in tensors_in(each.state_dict())}
            self._found = [
                (weakref.ref(m), _fingerprint(m)) for m in _unknown_modules(protected, kept)
            ]
            tables = _unknown_tables(protected, kept)
            self._tables = [(each, _numbers(each.values()), 0) for each in tables]
            return
        self._look_at_tables()
        now = [(ref, seen, ref()) for ref, seen in self._found]
        changed = [m for _, seen, m in now if m is not None and _fingerprint(m) != seen]
        if changed:
            own = _ids_inside(self._scratch)
            changed = [each for each in changed if id(each) not in own]
        if changed and self._changed:
            kept_now = self._contents()
            changed = [each for each in changed if not _is_among(each.parameters(), kept_now)]
        self._found = [(ref, _fingerprint(m)) for ref, _, m in now if m is not None]
        self._changed = self._changed + 1 if changed else 0
        if self._changed > 1:
            raise UserError(
                f"the script changes the parameters of a {type(changed[0]).__name__} that is not "
                "protected, so that a worker that joins would begin with a fresh one: name it in "
                "job.protect(...), as averages of weights and target networks must be; or put it "
                "into job.scratch if no result depends on it"
            )

    def _look_at_tables(self) -> None:
        """Keep watching only the tables that have changed; memory of the rest may be freed."""
        now = [(each, _numbers(each.values()), seen, n) for each, seen, n in self._tables]
        self._tables = [(each, found, n + 1) for each, found, seen, n in now if found != seen]
        if self._tables:
            own = _ids_inside(self._scratch)
            self._tables = [each for each in self._tables if id(each[0]) not in own]
        if any(times > 1 for *_, times in self._tables):
            kept = self._contents()
            self._tables = [
                (each, seen, 0 if _is_among(each.values(), kept) else times)
                for each, seen, times in self._tables
            ]
        for each, _, times in self._tables:
            if times > 1:
                raise UserError(
                    f"the script changes a dictionary of tensors with names of parameters "
                    f"({next(iter(each))}, ...), so that a worker that joins would begin "
                    "with fresh ones: keep such averages in a module (torch.optim.swa_utils."
                    "AveragedModel) that is named in job.protect(...), or, if no result depends on "
                    "them, in job.scratch"
                )

    def _contents(self) -> set[str]:
        """Return digests of the tensors in the protected objects' states, which may be copies."""
        tensors = (t for each in self._others for t in tensors_in(each.state_dict()))
        return {_describe_tensor(each) for each in tensors}


def _is_among(tensors: Iterable[torch.Tensor], contents: Collection[str]) -> bool:
    return all(_describe_tensor(each) in contents for each in tensors)


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {_numbers([tensor])}"


def _unknown_modules(protected: Collection[nn.Module], kept: Collection[int]) -> list[nn.Module]:
    """Return the outermost modules with parameters that are no part of a protected object.

    `kept`: addresses of further tensors that are protected.
    """
    inside = {id(each) for module in protected for each in module.modules()}
    known = {p.data_ptr() for module in protected for p in module.parameters()} | set(kept)
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(child) for each in every for child in each.children()}
    return [
        each
        for each in every
        if id(each) not in inside | parts and any(_is_unknown(p, known) for p in each.parameters())
    ]


def _is_unknown(parameter: torch.Tensor, known: Collection[int]) -> bool:
    return parameter.numel() > 0 and parameter.data_ptr() not in known


def _unknown_tables(
    protected: Collection[nn.Module], kept: Collection[int]
) -> list[dict[str, Any]]:
    """Return the dictionaries with a tensor of its own for each trained parameter of a module."""
    held = [each for m in protected for each in (*m.parameters(), *m.buffers())]
    known = {each.data_ptr() for each in held} | set(kept)
    names = [{n for n, p in m.named_parameters() if p.requires_grad} for m in protected]
    dicts = [each for each in gc.get_objects() if type(each) is dict]
    return [
        each
        for each in dicts
        if any(wanted and wanted <= each.keys() for wanted in names)
        and all(_is_free(value) and value.data_ptr() not in known for value in each.values())
    ]


def _ids_inside(scratch: Mapping[str, Any]) -> set[int]:
    """Return the ids of all objects in a script's scratch: items, and attributes of its objects."""
    found: set[int] = set()
    left: list[Any] = list(scratch.values())
    while left:
        each = left.pop()
        if id(each) in found or isinstance(each, type | types.ModuleType | types.FunctionType):
            continue
        found.add(id(each))
        if isinstance(each, dict | list | tuple):
            left += each.values() if isinstance(each, dict) else each
        elif not isinstance(each, torch.Tensor):
            left += getattr(each, "__dict__", {}).values()
    return found


def _is_free(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and value.numel() > 0


def _fingerprint(module: nn.Module) -> Numbers:
    return _numbers(module.parameters())


def _numbers(tensors: Iterable[torch.Tensor]) -> Numbers:
    """Return the first numbers of a few tensors; they show writes through `data`, too."""
    some = (each for each in tensors if each.numel() and not isinstance(each, AbsentWeight))
    few = itertools.islice(some, TENSORS_MAX)
    return tuple(repr(each.detach().flatten()[:NUMBERS_MAX].cpu().tolist()) for each in few)
