"""Checks the moves of a machine between its phases against a table of legal moves.

It does not know any machine. A machine that makes an illegal move stops there, and must not
continue in an unforeseen state. The error names both phases.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from holdfast.engine.core.errors import require

P = TypeVar("P", bound=enum.Enum)


class Transitions(Generic[P]):
    """Keeps the legal moves: `moves` maps each phase to the phases that may follow.

    Each phase has an entry, which may be empty. `always`: the phase that may follow
    every phase, itself included.
    """

    def __init__(self, moves: Mapping[P, tuple[P, ...]], *, always: P) -> None:
        self._moves = moves
        self.always = always

    def check(self, old: P, new: P) -> P:
        """Return `new` if it may follow `old`. InvariantError otherwise."""
        name = type(old).__name__
        legal = new is self.always or new in self._moves[old]
        require(legal, f"{name} must not go from {old.value} to {new.value}")
        return new

    def pairs(self) -> Iterator[tuple[P, P]]:
        """Give the moves of the table in its order, without those to the phase `always`."""
        for old, after in self._moves.items():
            for new in after:
                yield old, new
