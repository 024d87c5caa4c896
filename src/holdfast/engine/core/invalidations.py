"""Decides which copies of the state are invalidated, since something wrong was used. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.engine.core.types import ViewNumber, WorkerId

INVALIDATIONS_MAX = 16  # the newest are remembered; by then older ones have been removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidation:
    """Declares copies of the state untrue: of steps beyond `after`, made in views up to `view`."""

    after: int
    view: ViewNumber
    #: The workers that have computed wrongly in that view again and again.
    wrong: tuple[WorkerId, ...] = ()


Invalidations = tuple[Invalidation, ...]


def merge(known: Invalidations, more: Iterable[Invalidation]) -> Invalidations:
    """Join invalidations in the order of their views; an invalidation that another covers goes.

    Any order of arrival gives the same: a worker that is wrong in a view stays accused.
    """
    found = [*known, *more]
    kept: list[Invalidation] = []
    for each in sorted(found, key=lambda each: (-each.view, each.after)):
        if not is_covered(each, kept):
            accused = {w for other in found if other.view == each.view for w in other.wrong}
            kept.append(dataclasses.replace(each, wrong=tuple(sorted(accused))))
    return tuple(reversed(kept[:INVALIDATIONS_MAX]))


def is_covered(invalidation: Invalidation, by: Iterable[Invalidation]) -> bool:
    """Return whether another invalidation covers every copy of the state that this one covers."""
    return any(
        other.after <= invalidation.after and other.view >= invalidation.view for other in by
    )


def is_invalidated(invalidations: Invalidations, step: int, view: ViewNumber) -> bool:
    """Return whether this covers a copy of the state after `step` steps, made in a view."""
    return any(
        step > invalidation.after and view <= invalidation.view for invalidation in invalidations
    )
