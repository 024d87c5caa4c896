"""Describes one worker's end of a view's process group, and the consequences of the view."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Key

VIEWS_KEPT = 8
What = tuple[str, int]  # the kind of a message, and which one of its kind
TurnOf = tuple[str, int, int]  # the same of an exchange, and which message of its sender


class UnderWay(Protocol):
    """Is an exchange that a member has begun, and that is not complete."""

    def advance(self) -> None: ...


class Shape:
    """Keeps the consequences of a view."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.keys: tuple[Key, ...] = tuple(
            (int(m.worker), int(m.incarnation)) for m in view.members
        )
        self.joiners = frozenset(view.joiners)
        self.joiner_keys = tuple(key for key in self.keys if key[0] in self.joiners)
        self.donors = len(view.donors)
        self.ranks = {key: rank for rank, key in enumerate(self.keys)}


class Shapes:
    """Keeps the shapes of the newest views."""

    def __init__(self) -> None:
        self._kept: dict[int, Shape] = {}

    def of(self, view: View) -> Shape:
        shape = self._kept.get(view.number)
        if shape is None or shape.view is not view:
            shape = self._kept[view.number] = Shape(view)
            if len(self._kept) > VIEWS_KEPT:
                del self._kept[min(self._kept)]
        return shape


class Group:
    """Keeps one worker's end of a view's process group: messages by kind and sender."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.view = shape.view
        self.number = shape.view.number
        self.keys = shape.keys
        self.open = True
        self.heard: dict[What, dict[Key, Any]] = {}
        self.turns: dict[str, int] = {}  # exchanges begun, by kind
        self.under_way: dict[What, UnderWay] = {}
        self.come: dict[tuple[TurnOf, Key], Any] = {}  # messages whose turn has yet to come
        self._over: dict[str, int] = {}  # the last complete exchange, by kind

    def turn(self, kind: str) -> What:
        """Begin the next exchange of this kind; all members begin the same ones in order."""
        self.turns[kind] = self.turns.get(kind, -1) + 1
        return kind, self.turns[kind]

    def newest_turn(self, kind: str) -> What:
        """Return the exchange of this kind that was begun last."""
        return kind, self.turns.get(kind, -1)

    def rank_of(self, key: Key) -> int:
        """Return the rank of a member."""
        return self.shape.ranks[key]

    def finish(self, what: What) -> None:
        """Record that an exchange is complete here."""
        self.under_way.pop(what, None)
        self._over[what[0]] = what[1]

    def is_over(self, kind: str, number: int) -> bool:
        """Return whether an exchange is complete here."""
        return number <= self._over.get(kind, -1)

    def messages_of_all(self, what: What) -> dict[Key, Any] | None:
        """Return the messages of all members, once they are here."""
        found = self.heard.get(what, {})
        return found if len(found) == len(self.keys) else None
