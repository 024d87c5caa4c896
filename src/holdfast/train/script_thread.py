"""Runs the script's own thread between `job.steps` and its end: loops, steps and tasks.

It computes tasks, applies committed gradients and copies its share of the state when it is told to;
it never takes part in the exchange itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from holdfast.core import tree
from holdfast.core.errors import InvariantError
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.core.step.events import Purpose
from holdfast.train.checkpoint.saver import Saver
from holdfast.train.data.batch_loading import BatchSource
from holdfast.train.data.random_streams import enter_stream
from holdfast.train.data.sampling import SamplePlan
from holdfast.train.driver import Driver
from holdfast.train.ledger_recorder import LedgerRecorder
from holdfast.train.step.fingerprints import Fingerprints
from holdfast.train.step.probe import current
from holdfast.train.step.speculative import FinishedTask
from holdfast.train.step.step_data import StepData

SAVE_S_MAX = 600.0  # how long the end of a loop waits for a checkpoint under way


class TaskRunner:
    """Begins and ends tasks: gradients, buffers and clocks around the script's own computing."""

    def __init__(self, driver: Driver, data: StepData, keeps_all_buffers: bool) -> None:
        self._driver = driver
        self._data = data
        self._keeps_all = keeps_all_buffers  # virtual rank 0 may be dropped

    def begin(self, task: ef.Compute) -> None:
        """Note that the script is about to compute a task."""
        data = self._data
        if task.purpose is Purpose.HOSTED:
            data.clock.begin()
        data.buffers.restore()
        data.digest.begin(task.digest, task.near)
        data.gradients.begin_task(task.vrank, task.purpose)

    def end(self, task: ef.Compute, finished: FinishedTask) -> None:
        """Note that the script has computed its task."""
        data, driver, vrank = self._data, self._driver, task.vrank
        data.gradients.end_task()
        if task.purpose is Purpose.HOSTED:
            current.probe.task(task.step, vrank)
            data.clock.end()
        first = vrank == 0 or self._keeps_all
        if first and len(data.buffers) and task.purpose is not Purpose.AUDITED:
            finished = replace(finished, left=data.buffers.changes())
        with driver.monitor:
            if task.purpose is Purpose.HOSTED:
                self.put(vrank, finished)
            elif task.purpose is Purpose.SPECULATIVE:
                data.speculative.keep(vrank, finished)
            digest = data.taken_digest()
            driver.post(ev.TaskDone(task.step, vrank, task.purpose, finished.count, digest))

    def put(self, vrank: int, finished: FinishedTask) -> None:
        """Note the row of a task that this worker hosts."""
        me, data = self._driver.status(), self._data
        host = me.worker, me.incarnation
        data.own.put(vrank, finished.loss, finished.count, finished.digest, host)
        if finished.left is not None:
            data.buffers.keep(vrank, finished.left)

    def adopt(self, vrank: int) -> None:
        """Note that a speculative task is this worker's own task now."""
        me = self._driver.status()
        with self._driver.monitor:
            self._data.speculative.adopt(vrank, (me.worker, me.incarnation))


class ScriptThread:
    """Runs the job's loops as the machine orders."""

    def __init__(
        self,
        driver: Driver,
        data: StepData,
        runner: TaskRunner,
        fingerprints: Fingerprints,
        saver: Saver | None,
        recorder: LedgerRecorder,
    ) -> None:
        self.runner = runner
        self._driver = driver
        self._data = data
        self._fingerprints = fingerprints
        self._saver = saver
        self._recorder = recorder
        self._begun = False  # some step
        self._plan: SamplePlan  # of the present loop

    def loop(self, plan: SamplePlan, until: int) -> Iterator[int]:
        """Walk through the steps of one loop, from wherever the job stands."""
        driver = self._driver
        self._plan = plan
        self._recorder.begin(plan)
        driver.post(ev.LoopEntered(until))
        while (index := self._enter_step(until)) < until:
            yield index
        self._recorder.end()
        driver.post(ev.LoopFinishing())
        if self._saver is not None:
            self._saver.finish(SAVE_S_MAX)
        driver.post(ev.LoopEnded())
        while not isinstance(driver.next_for_script(), ef.Release):
            pass

    def tasks(self, source: BatchSource, until: int) -> Iterator[ef.Compute]:
        """Walk through the tasks of the open step, until it is committed."""
        followed: tuple[int, ...] = ()
        while True:
            order = self._driver.next_for_script()
            match order:
                case ef.Adopt(vrank):
                    self.runner.adopt(vrank)
                case ef.Compute():
                    hosted = self._driver.status().hosted
                    if order.purpose is Purpose.HOSTED and hosted != followed:
                        followed = hosted
                        source.follow(hosted, order.step, until)
                    yield order
                case ef.Commit():
                    return
                case _:
                    raise InvariantError(f"{order} came in the middle of a step")

    def finish(self, index: int) -> float:
        """Hand the committed step's gradient and buffers to the script; return its loss."""
        data, plan = self._data, self._plan
        if self._saver is not None:
            self._saver.before_update()
        data.buffers.apply()
        table, vranks = data.table, plan.virtual_ranks
        samples, counted = plan.step_samples(index), sum(table.counts())
        scale = samples / counted  # 1 unless something was dropped
        data.gradients.publish(table.used, scale)
        enter_stream(plan.seed, index, vranks, "job")
        weighted = zip(table.losses(), plan.weights(index), strict=True)
        losses = {(v, 1): loss * weight for v, (loss, weight) in enumerate(weighted)}
        total = tree.fold(losses, vranks, lambda a, b: a + b)
        loss = total / vranks * scale
        self._recorder.commit(index, data.reduced_in, table, loss, samples - counted)
        return loss

    def _enter_step(self, until: int) -> int:
        """Wait at the boundary; returns the step that may be computed now."""
        driver, committed = self._driver, self._driver.status().committed
        if self._begun and committed >= until:
            return committed
        driver.post(ev.AtBoundary())
        while not isinstance(order := driver.next_for_script(), ef.Begin):
            if isinstance(order, ef.SaveShare):
                self._save(order)
        self._begun = True
        if order.step < until:
            self._open(order)
        return order.step

    def _open(self, begin: ef.Begin) -> None:
        data, prints = self._data, self._fingerprints
        current.probe.boundary(begin.step, prints.protected)
        data.gradients.begin_step()
        data.buffers.remember()
        start = data.buffers.start
        whole = prints.of_all(start) if begin.whole and prints.cycle > 1 else 0
        part = prints.of_step(begin.step, start)
        with self._driver.monitor:
            data.open((part, whole))
            self._driver.post(ev.StepOpened(begin.step))

    def _save(self, order: ef.SaveShare) -> None:
        began, problem = time.monotonic(), "there is no writer"
        if self._saver is not None:
            worker = self._driver.status().worker
            problem = self._saver.copy(order.step, order.view, worker)
        self._driver.post(ev.ShareCopied(order.step, time.monotonic() - began, problem))
