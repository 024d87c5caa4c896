"""Reads a stream: shards that can only be gone through in order, one for each virtual rank.

A shard is read where its virtual rank is hosted. Where it comes to another worker it is opened
there and gone through up to where the job stands, which costs reading what came before. Invariant:
what a task gets depends on the shard's position only, never on who has read it before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import UserError
from holdfast.train.data.batch_loading import one_thread
from holdfast.train.data.random_streams import enter_stream
from holdfast.train.data.shard_positions import Position, StreamPlan

MakeShard = Callable[[int, int], Iterable[Any]]  # number of the shard, number of shards


class Stream:
    """Holds a stream and the way its samples fall into steps; made by `Job.stream`.

    `positions`: where the shards stand; a part of the job's state.
    """

    quarantine = None

    def __init__(
        self,
        make: MakeShard,
        collate_fn: Callable[[list[Any]], Any],
        plan: StreamPlan,
        positions: list[Position],
        tell: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.positions = positions
        self.make = make
        self.collate = collate_fn
        self.tell = tell
        self._first_step: int | None = None  # None: no loop has used it

    def begin(self, step: int) -> StreamPlan:
        """Note that a loop that uses it begins at `step`; returns the plan from its first use."""
        if self._first_step is None:
            self._first_step = step
            self.plan = dataclasses.replace(self.plan, first_step=step)
        if all(position[:2] == (0, 0) for position in self.positions):
            self.positions[:] = self.plan.start()
        return self.plan

    def source(self, plan: StreamPlan) -> StreamSource:
        """Return what reads the batches."""
        return StreamSource(self, plan)

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Note what all tasks of a step of the script have used, by virtual rank. UserError."""
        self.positions[:] = self.plan.after(self.positions, step, counts, digests)

    def samples(self, step: int) -> dict[str, str]:
        """Return no samples, as only the worker that hosts a shard reads it."""
        return {}


@dataclass(slots=True)
class _Shard:
    """Reads one shard in one epoch."""

    epoch: int
    samples: Iterator[Any]
    taken: int = 0


class StreamSource:
    """Provides the batches of one stream, for the virtual ranks that this worker hosts."""

    def __init__(self, stream: Stream, plan: StreamPlan) -> None:
        self.plan = plan
        self._stream = stream
        self._shards: dict[int, _Shard] = {}
        self._step = -1
        self._used: dict[int, tuple[list[Any], int]] = {}  # samples of the step, and their digest

    def follow(self, vranks: Sequence[int], from_step: int, until: int) -> None:
        """Close the shards that this worker does not host any more."""
        self._shards = {v: shard for v, shard in self._shards.items() if v in vranks}

    def batch(self, step: int, vrank: int) -> Any:
        """Return the collated batch of a task, or None if the task has no samples."""
        if step != self._step:
            self._step = step
            self._used.clear()
        if vrank not in self._used:
            with one_thread():
                self._used[vrank] = self._read(step, vrank)
        samples, _ = self._used[vrank]
        if not samples:
            return None
        enter_stream(self.plan.seed, step, vrank, "collate")
        with one_thread():
            return self._stream.collate(samples)

    def again(self, step: int, vrank: int) -> Any:
        """Return the batch of a task, collated once more: a stream is read only once."""
        return self.batch(step, vrank)

    def used(self, step: int, vrank: int) -> tuple[int, int]:
        """Return how many samples the task has used, and their digest."""
        samples, digest = self._used[vrank]
        return len(samples), digest

    def told(self, step: int, vrank: int) -> bytes:
        """Return that nothing is told: what cannot be read of a stream ends the job."""
        return b""

    def scale(self, step: int, vrank: int) -> float | None:
        """Return None, as the samples of the whole step are counted after it."""
        return None

    def close(self) -> None:
        """Close all shards."""
        self._shards.clear()

    def _read(self, step: int, vrank: int) -> tuple[list[Any], int]:
        """Read the next batch of a shard; at its end, the first one of its next epoch."""
        epoch, taken, _ = self._stream.positions[vrank]
        shard = self._at(vrank, self._stream.positions[vrank])
        samples = self._take(shard, step, vrank)
        if not samples:
            epoch, taken = epoch + 1, 0
            shard = self._shards[vrank] = self._open(vrank, epoch)
            samples = self._take(shard, step, vrank)
        if len(samples) < self.plan.batch_size:
            del self._shards[vrank]
        return samples, self.plan.digest(vrank, epoch, taken, len(samples))

    def _at(self, vrank: int, position: Position) -> _Shard:
        """Return the shard's reader at this position, opened anew if need be."""
        epoch, taken, began = position
        shard = self._shards.get(vrank)
        if shard is None or shard.epoch != epoch or shard.taken > taken:
            shard = self._shards[vrank] = self._open(vrank, epoch)
        if shard.taken < taken:
            self._stream.tell(
                f"shard {vrank} is read up to sample {taken} of epoch {epoch} to go on"
            )
        while shard.taken < taken:
            step = began + shard.taken // self.plan.batch_size
            if not self._take(shard, step, vrank):
                raise UserError(
                    f"shard {vrank} of the stream has ended after {shard.taken} samples where it "
                    f"had {taken} before: a shard must give the same samples each time"
                )
        return shard

    def _open(self, vrank: int, epoch: int) -> _Shard:
        enter_stream(self.plan.seed, epoch, vrank, "shard")
        samples = self._stream.make(vrank, self.plan.virtual_ranks)
        set_epoch = getattr(samples, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return _Shard(epoch, iter(samples))

    def _take(self, shard: _Shard, step: int, vrank: int) -> list[Any]:
        enter_stream(self.plan.seed, step, vrank, "data")
        samples = list(itertools.islice(shard.samples, self.plan.batch_size))
        shard.taken += len(samples)
        return samples


def shards_of(dataset: Any) -> MakeShard:
    """Return what makes the shards of a stream; UserError if it cannot be cut into any.

    `dataset`: a function of a shard's number and how many there are, or a dataset with a method
    `shard(num_shards, index)`, as those of Hugging Face's `datasets`.
    """
    if callable(getattr(dataset, "shard", None)):

        def shard(number: int, count: int) -> Iterable[Any]:
            found: Iterable[Any] = dataset.shard(num_shards=count, index=number)
            return found

        return shard
    if callable(dataset):
        return dataset
    raise UserError(
        f"job.stream({type(dataset).__name__}): this stream cannot be cut into shards; give a "
        "function of (shard, shards) that returns the samples of one of them, in order"
    )
