"""Whose results of a step count, when it does not wait for all. Pure.

With backup workers a step is complete once all but so many members are done with all their tasks;
what the others compute of it is dropped (Chen, Monga, Bengio, Jozefowicz, "Revisiting Distributed
Synchronous SGD", arXiv:1604.00981, 2016).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.core.types import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupPolicy:
    """`workers`: how many members a step may do without; 0: none.

    `results_min`: from how many members it wants results, if there are as many: after a failure
    there is nobody to spare.
    """

    workers: int = 0
    results_min: int = 1

    def needed(self, members: int) -> int:
        """From how many of them results are waited for."""
        return max(members - self.workers, min(self.results_min, members))


def who_counts(policy: BackupPolicy, members: int, done: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks whose results count, once enough members are done; empty: more are waited for.

    `done`: how many samples each of them has used. A step without a sample would be none.
    """
    enough = len(done) >= policy.needed(members) and any(done.values())
    return tuple(sorted(done)) if enough or len(done) == members else ()


class Tally:
    """What was dropped in a loop, as far as one worker took part in it, for the job's event log."""

    def __init__(self) -> None:
        self.steps = 0  # in which something was
        self._first = 0  # of these
        self._samples = 0
        self._steps_of: Counter[WorkerId] = Counter()

    def note(self, step: int, workers: Collection[WorkerId], samples: int) -> bool:
        """What these computed of a step was dropped; whether to tell of it: ever more rarely."""
        if not self.steps:
            self._first = step
        self.steps += 1
        self._samples += samples
        self._steps_of.update(workers)
        return self.steps & (self.steps - 1) == 0

    def __str__(self) -> str:
        each = ", ".join(f"of worker {w} in {n}" for w, n in sorted(self._steps_of.items()))
        since = f"since step {self._first}, in {self.steps} steps"
        return f"{self._samples} samples were dropped {since} ({each})"
