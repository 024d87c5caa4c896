"""Makes one simulated worker compute wrongly, or forget, with the numbers that come of it."""

from __future__ import annotations

from collections import Counter
from random import Random

from holdfast.lab.sim.arithmetic import make_not_finite, task

LACKS = 7919  # a number that no token differs by from another


class Spoiling:
    """Keeps the ways in which one process's bits are wrong; set by faults."""

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
