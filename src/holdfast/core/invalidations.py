"""Decides which copies of the state are invalidated, since something wrong was used. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.types import Invalidation, ViewNumber

INVALIDATIONS_MAX = 16  # the newest are remembered; by then older ones have been removed

Invalidations = tuple[Invalidation, ...]


def merge(known: Invalidations, more: Iterable[Invalidation]) -> Invalidations:
    """Join invalidations, without those that are part of another, in the order of their views."""
    found = sorted(
        [*known, *more], key=lambda invalidation: (invalidation.view, -invalidation.after)
    )
    kept: list[Invalidation] = []
    for invalidation in reversed(found):
        if not any(invalidation.after >= other.after for other in kept):
            kept.append(invalidation)
    return tuple(reversed(kept[:INVALIDATIONS_MAX]))


def is_invalidated(invalidations: Invalidations, step: int, view: ViewNumber) -> bool:
    """Tell whether this covers a copy of the state after `step` steps, made in a view."""
    return any(
        step > invalidation.after and view <= invalidation.view for invalidation in invalidations
    )
