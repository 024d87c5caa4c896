"""Describes one worker's end of a view's process group, and the consequences of the view."""

from __future__ import annotations

from typing import Any

from holdfast.core.types import View
from holdfast.sim.arithmetic import Key

VIEWS_KEPT = 8
What = tuple[str, int]  # the kind of a message, and which one of its kind


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

    def turn(self, kind: str) -> What:
        """Begin the next exchange of this kind; all members begin the same ones in order."""
        self.turns[kind] = self.turns.get(kind, -1) + 1
        return kind, self.turns[kind]

    def newest_turn(self, kind: str) -> What:
        """Return the exchange of this kind that was begun last."""
        return kind, self.turns.get(kind, -1)

    def messages_of_all(self, what: What) -> dict[Key, Any] | None:
        """Return the messages of all members, once they are here."""
        found = self.heard.get(what, {})
        return found if len(found) == len(self.keys) else None
