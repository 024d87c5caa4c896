"""Loads batches for the virtual ranks that this worker hosts, ahead, in processes of their own.

Must not know views, peers or models: its caller gives it the tasks to `follow` and asks for one
batch at a time. Invariant: `batch(step, vrank)` has the same bits however it was loaded: ahead or
just now, in this process or another, before or after a change of assignment or the death of a data
worker. All of it rests on purity: the dataset's `dataset[i]` may depend only on `i` and on the
global generators of Python, NumPy and torch, and must be callable in the training process too.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils import pin_memory, signal_handling

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.machine_errors import MachineError, Raised, judge_error
from holdfast.engine.host.host import advise_on_shared_memory
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.train.data.data_workers import enter_data_worker, sweep_shared_memory
from holdfast.engine.train.data.map_style import dataset_length
from holdfast.engine.train.data.plain_data import are_plain_samples, holds_tensors, is_plain_collate
from holdfast.engine.train.data.quarantine import Quarantine, encode_bad, replace_bad
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.verified_samples import Checks, Reading, SampleReader

Task = tuple[int, int]  # (step, vrank)
_Batch = tuple[Any, Reading]  # a collated batch, and the records that were read for it
# A task, the keys of its samples, and records that it must leave out.
Order = tuple[Task, list[Any], frozenset[int]]

RESTARTS_MAX = 3  # restarts of the data workers without one batch in between
POLL_S = 0.2  # how soon a thread that waits for a data worker notices its death
_TIMED_OUT = "DataLoader timed out"  # how PyTorch's message begins when only the poll ran out
_SHARED_MEMORY = MachineError.SHARED_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Configures the loading of batches. With `num_workers=0` they are loaded inline."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] = default_collate
    pin_memory: bool = False
    prefetch_factor: int = 2  # tasks under way or waiting, per data worker
    multiprocessing_context: Any = None  # a name or a context; None is PyTorch's default

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UserError(f"num_workers={self.num_workers} is negative: give 0 or more")
        if self.prefetch_factor < 1:
            raise UserError(f"prefetch_factor={self.prefetch_factor} is too small: give 1 or more")


@dataclass(slots=True)
class LoadStats:
    """Counts what a source has done so far, for metrics and tests."""

    ahead: int = 0  # batches handed out that data workers had loaded
    inline: int = 0  # batches loaded by the training process itself
    discarded: int = 0  # loaded ahead for an assignment that changed
    restarts: int = 0  # restarts of the data workers, after one was killed


def _write_line(text: str) -> None:
    print_plain(f"holdfast: {text}", file=sys.stderr)


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


class BatchSource:
    """Provides the batches of one dataset, for the virtual ranks that this worker hosts.

    Use it from one thread, which must live as long as the source: the kernel kills data workers
    when the thread that started them ends.
    """

    def __init__(
        self,
        dataset: Any,
        plan: LoadPlan,
        options: LoadOptions | None = None,
        checks: Checks | None = None,
        quarantine: Quarantine | None = None,
        say: Callable[[str], None] = _write_line,
    ) -> None:
        self.plan = plan
        self.options = options or LoadOptions()
        self.stats = LoadStats()
        self._quarantine = quarantine
        self._say = say  # reports records that could be read only at another attempt
        self._advice = _Advice(say)
        reader = SampleReader(dataset, plan.length or 0, checks)
        self._tasks = _Tasks(reader, plan.seed, self.options.collate_fn)
        self._feed = _Feed(plan, self._left_out_records)
        self._pipeline = _Pipeline(self._tasks, self._feed, self.options)
        self._ready: dict[Task, _Batch] = {}  # loaded ahead, still wanted, not yet asked for
        self._last: tuple[Task, Reading] | None = None  # the last batch handed out
        self._failures = 0  # restarts since a data worker last delivered anything

    def follow(self, vranks: Sequence[int], from_step: int, until: int) -> None:
        """Prepare for hosting `vranks` from now on, for the steps from_step .. until-1.

        Called at the start and at every change of assignment; the first call starts the data
        workers. Batches that are loaded already and still wanted are kept. May go back to earlier
        steps.
        """
        planned, dataset = self.plan.length, self._tasks.reader.dataset
        if planned is not None and (length := dataset_length(dataset)) != planned:
            raise UserError(
                f"the dataset has {length} samples but its plan was made for {planned}: "
                "do not change a dataset's length during a job"
            )
        self._feed.follow(tuple(vranks), from_step, until, keep=self._known_tasks())
        for task in [t for t in self._ready if not self._feed.wants(t)]:
            self._discard(task)
        if self.options.num_workers and not self._pipeline.has_started:
            if self._feed.peek() is not None:
                self._pipeline.start()
        else:
            self._refresh(len(self._pipeline.sent), idle_only=True)

    def batch(self, step: int, vrank: int) -> Any:
        """Return the collated batch of a task, or None if the task has no samples.

        May load it in this process, which enters the stream (seed, step, vrank, "data") unless the
        samples are plain: enter the model's stream after this call, not before. The dataset's own
        exceptions pass through unchanged. WorldError: the data workers keep dying.
        """
        task = (step, vrank)
        self._advance(step)
        while task not in self._ready and task in self._pipeline.sent:
            self._receive()
        self._feed.held.add(task)  # do not load it ahead again, unless a follow() goes back
        if task in self._ready:
            batch, reading = self._ready.pop(task)
            if self._is_current(task, reading):
                self.stats.ahead += 1
                return self._hand_out(task, batch, reading)
            self.stats.discarded += 1
        batch, reading = self._inline(task)
        # Meanwhile each data worker has most likely finished its present task, so replacing the
        # tasks at the front of the queue hardly waits.
        self._refresh(self.options.num_workers, idle_only=False)
        return self._hand_out(task, batch, reading)

    def load_again(self, step: int, vrank: int, *, in_data_worker: bool = False) -> Any:
        """Load the batch of a task once more, in this process.

        `in_data_worker`: in a data worker if there are any, whose copy of the dataset may differ.
        """
        task = (step, vrank)
        if in_data_worker and self._pipeline.has_started:
            self._feed.again = task
            while task not in self._pipeline.sent:
                self._receive()
            while task in self._pipeline.sent:
                self._receive()
        batch, reading = self._ready.pop(task) if task in self._ready else self._inline(task)
        return self._hand_out(task, batch, reading)

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return how many samples a task uses, and the digest of their indices."""
        reading = self._reading(step, vrank)
        if reading is None:
            return self.plan.task_samples(step, vrank), self.plan.digest(step, vrank)
        used = np.array(reading.used, dtype=np.int64)
        return len(used), SamplePlan.digest_of(used)

    def report_of(self, step: int, vrank: int) -> bytes:
        """Return which records a task had to leave out, and why, after its batch was handed out."""
        reading = self._reading(step, vrank)
        known = self._left_out_records(vrank)
        bad = {} if reading is None else reading.bad
        return encode_bad({r: why for r, why in bad.items() if r not in known})

    def scale(self, step: int, vrank: int) -> float | None:
        """Return the weight of a task's mean in the step's; None if each sample counts alike."""
        return self.plan.scale(step, vrank)

    def close(self) -> None:
        """End the data workers. A later `follow` starts new ones."""
        self._pipeline.stop(kill=False)
        self._ready.clear()
        self._feed.forget(())

    def _left_out_records(self, vrank: int) -> frozenset[int]:
        return frozenset() if self._quarantine is None else self._quarantine.known_records(vrank)

    def _reading(self, step: int, vrank: int) -> Reading | None:
        """Return the records read for the task's batch, if these may differ from the plan's."""
        if self._quarantine is None or self._last is None or self._last[0] != (step, vrank):
            return None
        return self._last[1]

    def _is_current(self, task: Task, reading: Reading) -> bool:
        """Return whether a batch loaded ahead has the records that the task would read now."""
        known = self._left_out_records(task[1])
        if not (known or reading.bad):
            return True
        planned = np.array(self.plan.keys(*task), dtype=np.int64)
        used, met = replace_bad(planned, known | reading.bad.keys(), self.plan.length or 0)
        return tuple(used.tolist()) == reading.used and met >= reading.bad.keys() - known

    def _hand_out(self, task: Task, batch: Any, reading: Reading) -> Any:
        self._last = task, reading
        for text in reading.healed:
            self._say(text)
        return batch

    def _known_tasks(self) -> set[Task]:
        return {t for t in self._pipeline.sent if t is not None} | set(self._ready)

    def _advance(self, step: int) -> None:
        """Treat the steps before the one asked for as over."""
        if step > self._feed.step:
            self._feed.step = step
            self._feed.held = {t for t in self._feed.held if t[0] >= step}
            for task in [t for t in self._ready if t[0] < step]:
                self._discard(task)

    def _discard(self, task: Task) -> None:
        self._ready.pop(task, None)
        self._feed.held.discard(task)
        self.stats.discarded += 1

    def _receive(self) -> None:
        """Take one result from the data workers, in the order in which tasks were sent."""
        try:
            task, failure, found = self._pipeline.receive()
        except _DataWorkerLost as lost:
            self._restart(lost)
            return
        self._failures = 0
        if task is None:
            return
        if not self._feed.wants(task):
            self._discard(task)
        elif failure:
            self._feed.held.discard(task)
            self._replay(task, failure)
        else:
            assert found is not None, "what was loaded without a failure is a batch"
            self._ready[task] = found

    def _replay(self, task: Task, failure: str) -> None:
        """Load a task here after the dataset raised in a data worker.

        Loading is pure, so this raises the same exception, with its own frames for a person to read
        or debug. If it does not, only the data worker was at fault, and the batch is good.
        """
        self._ready[task] = self._inline(task)
        if judge_error([Raised(classes=("RuntimeError",), text=failure)]).error is _SHARED_MEMORY:
            self._advice.give()
            return
        warnings.warn(
            f"loading {task} failed in a data worker but not in the training process:\n{failure}",
            RuntimeWarning,
            stacklevel=4,
        )

    def _restart(self, lost: _DataWorkerLost) -> None:
        """Send the tasks of a killed data worker, which is a machine fault, to new ones.

        They are not loaded here, because one of them may kill the process that loads it (a crash in
        a decoder, memory).
        """
        self._failures += 1
        self._pipeline.stop(kill=True)
        if lost.by_bus_error:
            self._advice.give()
        if self._failures > RESTARTS_MAX:
            raise WorldError(
                f"the data workers were lost {self._failures} times in a row: {lost}"
            ) from lost
        self.stats.restarts += 1
        self._feed.forget(self._ready)
        try:
            self._pipeline.start()
        except _DataWorkerLost as again:
            self._restart(again)

    def _refresh(self, count_max: int, *, idle_only: bool) -> None:
        """Receive up to `count_max` results, to make room for a task that is wanted sooner.

        The front of the queue may be empty, or be a task that is not wanted any more, or (after
        going back to an earlier step) a task that is wanted later.
        """
        sent = self._pipeline.sent
        for _ in range(count_max):
            urgent = self._feed.peek()
            if not sent or urgent is None:
                return
            front = sent[0]
            if front is not None and (idle_only or (self._feed.wants(front) and front < urgent)):
                return
            self._receive()

    def _inline(self, task: Task) -> _Batch:
        self.stats.inline += 1
        with limit_to_one_thread():
            keys = self.plan.keys(*task)
            batch, reading = self._tasks.load(task, keys, self._left_out_records(task[1]))
        if self.options.pin_memory and torch.cuda.is_available():
            return pin_memory.pin_memory(batch), reading
        return batch, reading


class _Advice:
    """Reports once that data workers find no room for their batches in shared memory."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_given = False

    def give(self) -> None:
        if not self._is_given:
            self._is_given = True
            self._say(
                "data workers cannot hand over batches, which the training process then loads "
                f"itself, slowly: {advise_on_shared_memory()}"
            )


class _Tasks:
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

    def __getitem__(self, order: Order | None) -> tuple[Task | None, str, _Batch | None]:
        """Return (task, traceback or "", batch)."""
        if order is None:
            return None, "", None
        try:
            return order[0], "", self.load(*order)
        except Exception:  # noqa: BLE001 - whatever it is, the training process will meet it
            return order[0], traceback.format_exc(), None

    def load(self, task: Task, keys: list[Any], left_out: frozenset[int]) -> _Batch:
        if not keys:
            return None, Reading(used=())
        begin = functools.partial(enter_stream, self._seed, *task, "data")
        plain = self.reader.is_plain and is_plain_collate(self._collate)
        samples, reading = self.reader.load(keys, left_out, _draw_nothing if plain else begin)
        if plain and not (holds_tensors(self.reader.dataset) or are_plain_samples(samples)):
            begin()  # collating them may draw random numbers
        return self._collate(samples), reading


class _Feed:
    """Decides which task is loaded next: the DataLoader's sampler, read one task at a time.

    It never ends: with nothing to load it gives None, so that a change of assignment finds the data
    workers running and their queue full, and needs no new iterator.
    """

    def __init__(self, plan: LoadPlan, left_out: Callable[[int], frozenset[int]]) -> None:
        self.step = 0  # earlier ones are over
        self.held: set[Task] = set()  # loaded, being loaded, or handed out already
        self.sent: deque[Task | None] = deque()
        self.again: Task | None = None  # a task to load next, though it was loaded before
        self._plan = plan
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
        """Return the next task, or None if there is nothing to load."""
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
        keys = [] if task is None else self._plan.keys(*task)
        if task is not None:
            self.held.add(task)
        self.sent.append(task)
        return None if task is None else (task, keys, self._left_out(task[1]))


class _DataWorkerLost(WorldError):
    """Is raised when a data worker was killed, or its result cannot be received.

    `by_bus_error`: the kernel has no room for what it wrote to memory that processes share.
    """

    def __init__(self, text: str, *, by_bus_error: bool = False) -> None:
        super().__init__(text)
        self.by_bus_error = by_bus_error


class _Pipeline:
    """Runs PyTorch's data workers around one feed: start, receive in order, stop."""

    def __init__(self, tasks: _Tasks, feed: _Feed, options: LoadOptions) -> None:
        self._tasks = tasks
        self._feed = feed
        self._options = options
        self._iterator: Any = None

    @property
    def sent(self) -> deque[Task | None]:
        """Return the tasks that data workers were given and have not delivered, in order."""
        return self._feed.sent

    @property
    def has_started(self) -> bool:
        return self._iterator is not None

    @property
    def processes(self) -> tuple[Any, ...]:
        return tuple(self._iterator._workers) if self.has_started else ()

    def start(self) -> None:
        loader: DataLoader[Any] = DataLoader(
            self._tasks,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._feed,
            num_workers=self._options.num_workers,
            collate_fn=_identity,
            pin_memory=self._options.pin_memory and torch.cuda.is_available(),
            timeout=POLL_S,
            worker_init_fn=enter_data_worker,
            multiprocessing_context=self._options.multiprocessing_context,
            # The loader's seeds have no use here; drawing them from the default generator would
            # disturb it.
            generator=torch.Generator(),
            prefetch_factor=self._options.prefetch_factor,
        )
        try:
            self._iterator = iter(loader)
        except RuntimeError as error:
            # Until it is disarmed below, PyTorch's handler raises here when a data worker dies.
            if "DataLoader worker" not in str(error):
                raise
            raise _DataWorkerLost(str(error)) from error
        _disarm(self._iterator)

    def receive(self) -> tuple[Task | None, str, _Batch | None]:
        """Wait for the oldest result under way. Raises _DataWorkerLost."""
        while True:
            try:
                result = next(self._iterator)
            except Exception as error:
                dead = [p for p in self.processes if not p.is_alive()]
                if not dead and isinstance(error, RuntimeError) and _TIMED_OUT in str(error):
                    continue
                codes = ", ".join(f"process {p.pid} ended with code {p.exitcode}" for p in dead)
                by_bus_error = any(p.exitcode == -signal.SIGBUS for p in dead)
                raise _DataWorkerLost(codes or repr(error), by_bus_error=by_bus_error) from error
            self.sent.popleft()
            return result

    def stop(self, *, kill: bool) -> None:
        """End the data workers: after their present task, or at once."""
        processes, iterator = self.processes, self._iterator
        self._iterator = None
        if iterator is None:
            return
        if kill:
            for process in processes:
                process.kill()
        iterator._shutdown_workers()
        for process in processes:
            sweep_shared_memory(process.pid)


def _draw_nothing() -> None:
    """Do nothing, instead of keying generators, where no code draws from them."""


def _identity(value: Any) -> Any:
    return value


def _disarm(iterator: Any) -> None:
    """Take our data workers off PyTorch's watch list.

    When one dies, PyTorch's SIGCHLD handler raises in the main thread at any point: inside the
    user's forward pass, or a collective. We look for deaths when we wait for a batch.
    """
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


@contextlib.contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Run torch on one thread, as data workers do: the bits of a sum may depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
