"""Cuts each virtual rank's batch into equal parts, one for each process of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.train.data.random_streams import stream_seed
from holdfast.train.data.sampling import SamplePlan


@dataclass(frozen=True, slots=True)
class PartOfPlan:
    """Is the plan of part `number` of `count`: of a task, it reads that part of the samples.

    A batch that does not fall into equal parts is read whole by all: the mean over the parts is
    then the mean over the batch, too. What is said of a task is said of all of it.
    """

    whole: SamplePlan
    number: int
    count: int

    @property
    def seed(self) -> int:
        """Return the seed of the random numbers that the part's tasks draw."""
        return stream_seed(self.whole.seed, self.number, self.count, "part")

    @property
    def length(self) -> int:
        """Return the length of the dataset."""
        return self.whole.length

    def keys(self, step: int, vrank: int) -> list[Any]:
        """Return which samples the part reads."""
        found = self.whole.keys(step, vrank)
        size, left = divmod(len(found), self.count)
        return found if left else found[self.number * size : (self.number + 1) * size]

    def task_samples(self, step: int, vrank: int) -> int:
        """Return the number of samples of the whole task."""
        return self.whole.task_samples(step, vrank)

    def digest(self, step: int, vrank: int) -> int:
        """Return the digest of the indices of the whole task's samples."""
        return self.whole.digest(step, vrank)

    def scale(self, step: int, vrank: int) -> float:
        """Return by what a task's mean counts in the step's."""
        return self.whole.scale(step, vrank)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the step's number in it."""
        return self.whole.epoch_of(step)
