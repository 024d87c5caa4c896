"""Computes simulated tasks, sums and updates, as numbers in which every deviation shows.

`Spoiling` makes one simulated worker compute wrongly, or forget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

Key = tuple[int, int]  # worker, incarnation
Copy = tuple[int | None, int | None]  # a state, and the trace of a flip in it
Parts = tuple[tuple[Key, int, int], ...]  # addends of a sum: sender, virtual rank and token
MISSING = -1  # stands for elements of a sum that a member lacks
DROPPED = 0  # the token of a task that came too late to count
_NOT_FINITE = -(1 << 80)  # tokens and sums up to this
INITIAL_STATE = 1
# Never the difference of two tokens.
MISSING_STATE_OFFSET = 7919


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


class Spoiling:
    """Describes how one process's bits are wrong. Faults set it."""

    def __init__(self, rng: Random, count: Counter[str]) -> None:
        self.flipped: int | None = None  # the part of its state in which a bit is wrong
        self.lies = 0  # added to its tokens; negative: each time another number
        self.lies_once = False
        self.lied_in = -1  # the last step with other numbers than before
        self.poisons_once = False  # its next gradient is not finite
        self.poisoned: Counter[int] = Counter()  # how often that happened in each step
        self.sums_wrongly = False  # in the next step
        self.lacks = 0  # added to its tokens, for the part of the state that it has joined without
        self._rng = rng
        self._count = count

    @property
    def is_spoiled(self) -> bool:
        """Return whether anything is wrong with it."""
        wrong = self.lies or self.lies_once or self.poisons_once or self.sums_wrongly
        return self.flipped is not None or bool(wrong)

    def is_ill(self, step: int) -> bool:
        """Return whether anything is wrong with it, or was in its present step, by number."""
        return self.is_spoiled or self.lied_in >= step

    def token(self, state: int, step: int, vrank: int) -> int:
        """Compute a task, as well as this process can."""
        token = task(state, step, vrank) + self.lacks
        if self.flipped is not None:
            token = hash((token, self.flipped, 41))
        if self.lies or self.lies_once:
            self.lies_once, self.lied_in = False, step
            token += self.lies if self.lies > 0 else self._rng.randint(1, 1000)
        if self.poisons_once:
            self.poisons_once, self.lied_in = False, step
            self.poisoned[step] += 1
            self._count["poisoned"] += 1
            count = self._count["poisoned"]  # no two have the same bits by chance
            token = make_not_finite(64 * count + self._rng.randrange(64))
        return token
