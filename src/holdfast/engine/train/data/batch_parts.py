"""Cuts each virtual rank's batch into equal parts, one for each process of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.engine.train.data.batch_loading import LoadPlan
from holdfast.engine.train.data.random_streams import stream_seed


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Is one process's part of each batch: part `number` of `count`.

    A batch that cannot be cut into equal parts is read whole by all: the mean over the parts is
    then the mean over the batch, too.
    """

    number: int = 0
    count: int = 1

    def of(self, samples: list[Any]) -> list[Any]:
        """Return this part of a batch's samples."""
        size, left = divmod(len(samples), self.count)
        return samples if left else samples[self.number * size : (self.number + 1) * size]

    def seed(self, seed: int) -> int:
        """Return the seed of the random numbers with which the part's samples are made."""
        return seed if self.count == 1 else stream_seed(seed, self.number, self.count, "part")


WHOLE = BatchPart()


@dataclass(frozen=True, slots=True)
class PartOfPlan:
    """Plans one part of each batch; counts, digests and weights are those of the whole task."""

    whole: LoadPlan
    part: BatchPart

    @property
    def seed(self) -> int:
        """Return the seed of the random numbers that the part's tasks draw."""
        return self.part.seed(self.whole.seed)

    @property
    def length(self) -> int | None:
        """Return the length of the dataset; None if that does not matter."""
        return self.whole.length

    def keys(self, step: int, vrank: int) -> list[Any]:
        """Return which samples the part reads."""
        return self.part.of(self.whole.keys(step, vrank))

    def task_samples(self, step: int, vrank: int) -> int:
        """Return the number of samples of the whole task."""
        return self.whole.task_samples(step, vrank)

    def digest(self, step: int, vrank: int) -> int:
        """Return the digest of the indices of the whole task's samples."""
        return self.whole.digest(step, vrank)

    def scale(self, step: int, vrank: int) -> float | None:
        """Return the weight of a task's mean in the step's; None if each sample counts alike."""
        return self.whole.scale(step, vrank)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the step's number in it."""
        return self.whole.epoch_of(step)
