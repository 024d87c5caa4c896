"""Loads batches for the virtual ranks that this worker hosts, ahead, in processes of their own.

Must not know views, peers or models: its caller gives it the tasks to `follow` and asks for one
batch at a time. Invariant: `batch(step, vrank)` has the same bits however it was loaded: ahead or
just now, in this process or another, before or after a change of assignment or the death of a data
worker. All of it rests on purity: the dataset's `dataset[i]` may depend only on `i` and on the
global generators of Python, NumPy and torch, and must be callable in the training process too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import pin_memory

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.machine_errors import MachineError, Raised, judge_error
from holdfast.engine.host.host import advise_on_shared_memory
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.train.data.batch_tasks import (
    WHOLE,
    Batch,
    BatchPart,
    LoadOptions,
    LoadPlan,
    Source,
    Task,
    TaskFeed,
    Tasks,
)
from holdfast.engine.train.data.data_workers import DataWorkerLost, Pipeline
from holdfast.engine.train.data.datasets import (
    dataset_length,
)
from holdfast.engine.train.data.quarantine import Quarantine, encode_bad, replace_bad
from holdfast.engine.train.data.random_streams import limit_to_one_thread
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.verified_samples import Checks, Reading, SampleReader

RESTARTS_MAX = 3  # restarts of the data workers without one batch in between
_SHARED_MEMORY = MachineError.SHARED_MEMORY


@dataclass(slots=True)
class LoadStats:
    """Counts what a source has done so far, for metrics and tests."""

    #: Batches handed out that data workers had loaded.
    ahead: int = 0
    #: Batches loaded by the training process itself.
    inline: int = 0
    #: Loaded ahead for an assignment that changed.
    discarded: int = 0
    #: Restarts of the data workers, after one was killed.
    restarts: int = 0


def _write_line(text: str) -> None:
    print_plain(f"holdfast: {text}", file=sys.stderr)


class BatchSource(Source):
    """Provides the batches of one dataset, for the virtual ranks that this worker hosts.

    `part`: the part of each batch that is loaded; counts, digests and weights are those of the
    whole task. Use it from one thread, which must live as long as the source: the kernel kills data
    workers when the thread that started them ends.
    """

    plan: LoadPlan

    def __init__(
        self,
        dataset: Any,
        plan: LoadPlan,
        options: LoadOptions | None = None,
        checks: Checks | None = None,
        quarantine: Quarantine | None = None,
        log: Callable[[str], None] = _write_line,
        part: BatchPart = WHOLE,
    ) -> None:
        self.plan = plan
        self.seed = part.seed(plan.seed)
        self._part = part
        self.options = options or LoadOptions()
        self.stats = LoadStats()
        self._quarantine = quarantine
        self._log = log  # reports records that could be read only at another attempt
        self._advice = _Advice(log)
        reader = SampleReader(dataset, plan.length or 0, checks)
        self._tasks = Tasks(reader, self.seed, self.options.collate_fn)
        self._feed = TaskFeed(self._keys, self._left_out_records)
        self._pipeline = Pipeline(self._tasks, self._feed, self.options)
        self._ready: dict[Task, Batch] = {}  # loaded ahead, still wanted, not yet asked for
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
        known = {t for t in self._pipeline.sent if t is not None} | set(self._ready)
        self._feed.follow(tuple(vranks), from_step, until, keep=known)
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
        # In that time each data worker has most likely finished its present task, so replacing the
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
        """Return the number of samples of a task, and the digest of their indices."""
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

    def _keys(self, task: Task) -> list[Any]:
        return self._part.of(self.plan.keys(*task))

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
        planned = np.array(self._keys(task), dtype=np.int64)
        used, met = replace_bad(planned, known | reading.bad.keys(), self.plan.length or 0)
        return tuple(used.tolist()) == reading.used and met >= reading.bad.keys() - known

    def _hand_out(self, task: Task, batch: Any, reading: Reading) -> Any:
        self._last = task, reading
        for text in reading.healed:
            self._log(text)
        return batch

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
        except DataWorkerLost as lost:
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

    def _restart(self, lost: DataWorkerLost) -> None:
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
        except DataWorkerLost as again:
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

    def _inline(self, task: Task) -> Batch:
        self.stats.inline += 1
        with limit_to_one_thread():
            keys = self._keys(task)
            batch, reading = self._tasks.load(task, keys, self._left_out_records(task[1]))
        if self.options.pin_memory and torch.cuda.is_available():
            return pin_memory.pin_memory(batch), reading
        return batch, reading


class _Advice:
    """Reports once that data workers find no room for their batches in shared memory."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._is_given = False

    def give(self) -> None:
        if not self._is_given:
            self._is_given = True
            self._log(
                "data workers cannot hand over batches, which the training process then loads "
                f"itself, slowly: {advise_on_shared_memory()}"
            )
