"""Which copies of the state are not to be believed, since something wrong was used. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.types import ViewNumber, Void

VOIDS_MAX = 16  # that are remembered, the newest; by then older ones have been removed

Voids = tuple[Void, ...]


def merge(known: Voids, more: Iterable[Void]) -> Voids:
    """All of them, but for those that are a part of another; in the order of their views."""
    found = sorted([*known, *more], key=lambda void: (void.view, -void.after))
    kept: list[Void] = []
    for void in reversed(found):
        if not any(void.after >= other.after for other in kept):
            kept.append(void)
    return tuple(reversed(kept[:VOIDS_MAX]))


def is_void(voids: Voids, step: int, view: ViewNumber) -> bool:
    """Whether this holds for a copy of the state after `step` steps that was made in a view."""
    return any(step > void.after and view <= void.view for void in voids)
