"""Chooses the batches that a worker loads, and loads one: plans of samples, parts, an order.

A plan maps tasks to samples. Where a worker has several processes, each of them reads an equal part
of every batch. The samples of a task depend on the task only, in whichever process it is loaded.
"""

from __future__ import annotations

import functools
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import default_collate

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.datasets import (
    are_plain_samples,
    holds_tensors,
    is_plain_collate,
)
from holdfast.engine.train.data.random_streams import enter_stream, stream_seed
from holdfast.engine.train.data.read_plans import OrderPlan, StreamPlan
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.verified_samples import Reading, SampleReader

Task = tuple[int, int]  # (step, vrank)
Batch = tuple[Any, Reading]  # a collated batch, and the records that were read for it
# A task, the keys of its samples, and records that it must leave out.
Order = tuple[Task, list[Any], frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Configures the loading of batches. With `num_workers=0` they are loaded inline."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] = default_collate
    pin_memory: bool = False
    #: Tasks under way or waiting, per data worker.
    prefetch_factor: int = 2
    #: A name or a context; None is PyTorch's default.
    multiprocessing_context: Any = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UserError(f"num_workers={self.num_workers} is negative: give 0 or more")
        if self.prefetch_factor < 1:
            raise UserError(f"prefetch_factor={self.prefetch_factor} is too small: give 1 or more")


class LoadPlan(Protocol):
    """Maps tasks to samples. `length`: samples in the dataset; None if it does not matter."""

    @property
    def seed(self) -> int: ...

    @property
    def length(self) -> int | None: ...

    def keys(self, step: int, vrank: int) -> list[Any]:
        """Return the keys of the task's samples, for the dataset."""
        ...

    def task_samples(self, step: int, vrank: int) -> int: ...

    def digest(self, step: int, vrank: int) -> int: ...

    def scale(self, step: int, vrank: int) -> float | None:
        """Return the weight of a task's mean in the step's; None if each sample counts alike."""
        ...

    def epoch_of(self, step: int) -> tuple[int, int]: ...


class Source:
    """Provides the inputs that a worker's tasks compute with; here without anything to load ahead.

    `plan`: maps tasks to samples. `seed`: of the random numbers that tasks draw.
    """

    plan: SamplePlan | OrderPlan | StreamPlan | LoadPlan
    seed: int

    def follow(self, vranks: Sequence[int], from_step: int, until: int) -> None:
        """Prepare for hosting these virtual ranks, for the steps from_step .. until-1."""

    def batch(self, step: int, vrank: int) -> Any:
        """Return the batch of a task, or None if the task has no samples."""
        raise NotImplementedError

    def load_again(self, step: int, vrank: int, *, in_data_worker: bool = False) -> Any:
        """Load the batch of a task once more; `in_data_worker`: there, if there are any."""
        return self.batch(step, vrank)

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return the number and the digest of a task's samples, once its batch was handed out."""
        raise NotImplementedError

    def report_of(self, step: int, vrank: int) -> bytes:
        """Return a task's report of bad records, after its batch was handed out."""
        return b""

    def scale(self, step: int, vrank: int) -> float | None:
        """Return the weight of a task's mean in the step's; None if each sample counts alike."""
        return None

    def close(self) -> None:
        """Free what was loaded."""


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


class Tasks:
    """Presents a dataset whose items are whole batches, keyed by task.

    It lives in this process and in every data worker; None stands for no task, which keeps a data
    worker's turn in the queue.
    """

    def __init__(
        self, reader: SampleReader, seed: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.reader = reader
        self._seed = seed
        self._collate = collate

    def __getitem__(self, order: Order | None) -> tuple[Task | None, str, Batch | None]:
        """Return (task, traceback or "", batch)."""
        if order is None:
            return None, "", None
        try:
            return order[0], "", self.load(*order)
        except Exception:  # noqa: BLE001 - whatever it is, the training process will meet it
            return order[0], traceback.format_exc(), None

    def load(self, task: Task, keys: list[Any], left_out: frozenset[int]) -> Batch:
        if not keys:
            return None, Reading(used=())
        begin = functools.partial(enter_stream, self._seed, *task, "data")
        plain = self.reader.is_plain and is_plain_collate(self._collate)
        samples, reading = self.reader.load(keys, left_out, _draw_nothing if plain else begin)
        if plain and not (holds_tensors(self.reader.dataset) or are_plain_samples(samples)):
            begin()  # collating them may draw random numbers
        return self._collate(samples), reading


class TaskFeed:
    """Decides which task is loaded next: the DataLoader's sampler, read one task at a time.

    It never ends: without a task to load it gives None, so that a change of assignment finds the
    data workers running and their queue full, and needs no new iterator.
    """

    def __init__(
        self, keys: Callable[[Task], list[Any]], left_out: Callable[[int], frozenset[int]]
    ) -> None:
        #: The first step that is not over.
        self.step = 0
        #: Loaded, being loaded, or handed out already.
        self.held: set[Task] = set()
        self.sent: deque[Task | None] = deque()
        #: A task to load next, though it was loaded before.
        self.again: Task | None = None
        self._keys = keys
        self._vranks: tuple[int, ...] = ()
        self._until = 0
        self._next: tuple[int, int] = (0, 0)  # step, position in _vranks
        self._left_out = left_out  # records, by virtual rank

    def follow(
        self, vranks: tuple[int, ...], from_step: int, until: int, *, keep: set[Task]
    ) -> None:
        if from_step < self.step:  # back in time: batches handed out are needed again
            self.held = keep
        self.step, self._until = from_step, until
        self._vranks = vranks
        self._next = (from_step, 0)

    def forget(self, keep: Any) -> None:
        """Send all tasks under way again, since the data workers have ended."""
        self.held -= {t for t in self.sent if t is not None and t not in keep}
        self.sent.clear()
        self._next = (self.step, 0)

    def wants(self, task: Task) -> bool:
        return self.step <= task[0] < self._until and task[1] in self._vranks

    def peek(self) -> Task | None:
        """Return the next task, or None if there is none to load."""
        step, position = max(self._next, (self.step, 0))
        while self._vranks and step < self._until:
            for index in range(position, len(self._vranks)):
                task = (step, self._vranks[index])
                if task not in self.held:
                    self._next = (step, index)
                    return task
            step, position = step + 1, 0
        self._next = (step, 0)
        return None

    def __iter__(self) -> Iterator[Order | None]:
        return self

    def __next__(self) -> Order | None:
        task = self.again or self.peek()
        self.again = None
        keys = [] if task is None else self._keys(task)
        if task is not None:
            self.held.add(task)
        self.sent.append(task)
        return None if task is None else (task, keys, self._left_out(task[1]))


def _draw_nothing() -> None:
    """Leave the generators alone, where no code draws from them."""
