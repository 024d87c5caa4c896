"""Finds modules that a script changes step by step and has not protected: averages, targets.

A worker that joins would begin them anew. Every module of the process is looked for once, in the
first step; frozen ones (teachers, feature extractors) do not change, and are not told of.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Collection

from torch import nn

from holdfast.core.errors import UserError

PARAMETERS_MAX = 4  # of a module that are looked at
NUMBERS_MAX = 16  # of each
Numbers = tuple[str, ...]


class UnprotectedModules:
    """Knows the modules with parameters that are no part of the protected ones."""

    def __init__(self) -> None:
        self._found: list[tuple[weakref.ref[nn.Module], Numbers]] | None = None
        self._changed = 0  # how often in a row one was seen to have changed

    def look(self, protected: Collection[nn.Module]) -> None:
        """Look whether one has changed since the last look. UserError if it has twice."""
        if self._found is None:
            self._found = [(weakref.ref(m), _print(m)) for m in _others(protected)]
            return
        now = [(ref, seen, ref()) for ref, seen in self._found]
        changed = [m for _, seen, m in now if m is not None and _print(m) != seen]
        self._found = [(ref, _print(m)) for ref, _, m in now if m is not None]
        self._changed = self._changed + 1 if changed else 0
        if self._changed > 1:
            raise UserError(
                f"the script changes the parameters of a {type(changed[0]).__name__} that is not "
                "protected, so that a worker that joins would begin it anew: name it in "
                "job.protect(...), as averages of weights and target networks must be"
            )


def _others(protected: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules with parameters of which no protected module is made."""
    inside = {id(each) for module in protected for each in module.modules()}
    known = {id(p) for module in protected for p in module.parameters()}
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(child) for each in every for child in each.children()}
    return [
        each
        for each in every
        if id(each) not in inside | parts and any(id(p) not in known for p in each.parameters())
    ]


def _print(module: nn.Module) -> Numbers:
    """Return the first numbers of a few parameters: what is written through `data` counts, too."""
    few = itertools.islice((p for p in module.parameters() if p.numel()), PARAMETERS_MAX)
    return tuple(repr(p.detach().flatten()[:NUMBERS_MAX].cpu().tolist()) for p in few)
