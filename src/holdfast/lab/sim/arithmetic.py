"""Computes simulated tasks, sums and updates, as numbers in which every deviation shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, int]  # worker, incarnation
Copy = tuple[int | None, int | None]  # a state, and the trace of a flip in it
Parts = tuple[tuple[Key, int, int], ...]  # addends of a sum: sender, virtual rank and token
MISSING = -1  # stands for elements of a sum that a member lacks
DROPPED = 0  # the token of a task that came too late to count
_NOT_FINITE = -(1 << 80)  # tokens and sums up to this
INITIAL_STATE = 1


def task(state: int, step: int, vrank: int) -> int:
    """Return the content of one gradient: a pure function, like the real one."""
    return hash((state, step, vrank, 17))


def add(left: int, right: int) -> int:
    """Add neither commutatively nor associatively, so that any other order of summation shows."""
    if is_not_finite(left) or is_not_finite(right):
        return _NOT_FINITE
    return hash((left, right, 5))


def mix(pieces: Sequence[int]) -> int:
    """Return the content of a sum whose pieces do not fit together: it equals no right sum."""
    return hash((*pieces, 37))


def make_not_finite(place: int) -> int:
    """Make a gradient that is not finite in one place."""
    return _NOT_FINITE - place


def is_not_finite(token: int) -> bool:
    """Return whether a gradient or a sum is not finite."""
    return token <= _NOT_FINITE


def apply(state: int, step: int, total: int) -> int:
    return hash((state, step, total, 29))


def expected_sum(state: int, step: int, vranks: int) -> int:
    """Sum pairs, then pairs of pairs: the definition of the canonical tree, level by level."""
    level = [task(state, step, v) for v in range(vranks)]
    while len(level) > 1:
        pairs = [add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """Describes the share of a step's sum that member `rank` of `size` keeps."""

    rank: int
    size: int
    total: int
