"""Runs the script's own thread between `job.steps` and its end: loops, steps and tasks.

It computes tasks, applies committed gradients and copies its share of the state when ordered; it
never takes part in the exchange itself. A step of the script is one step of the job, or several
that follow each other with no boundary between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import msgspec

from holdfast.engine.core.errors import InvariantError, UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Digest, Purpose, StepKind
from holdfast.engine.core.step.audit import FICKLE, SUBSTITUTED, Sketch
from holdfast.engine.records.ledger import Place, StepDigests, Uses
from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.data.data_facts import Facts
from holdfast.engine.train.data.quarantine import reason_to_stop
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import LoopData, Plan, Source
from holdfast.engine.train.script.carried_variables import join_names
from holdfast.engine.train.script.epoch_start import EpochStart
from holdfast.engine.train.script.ledger_recorder import LedgerRecorder
from holdfast.engine.train.script.loop_ends import LoopEnd
from holdfast.engine.train.script.script_guard import ScriptGuard
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.script.step_mean import StepMean, find_mean
from holdfast.engine.train.shards.inner_group import InnerGroup
from holdfast.engine.train.step.act import Act
from holdfast.engine.train.step.driver import LEFT_WRONG, Driver
from holdfast.engine.train.step.mover import StateMover
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.script_lines import name_line
from holdfast.engine.train.step.speculative import FinishedTask
from holdfast.engine.train.step.step_data import StepData
from holdfast.engine.train.step.task_files import TaskFiles
from holdfast.engine.train.step.task_report import TaskReport, read_report
from holdfast.engine.train.step.trained import SHOWN
from holdfast.engine.train.step.values import PROPOSAL

ADDED = (
    "the script has added {names} after its first step: a worker that joins runs the script from "
    "its first line and lacks them, so the job ends at its next join; build all layers before the "
    "first step, and freeze those that are trained later"
)
TRAINS = "trains"
STATE_OF_EARLIER_LINE = (
    "it was given a state that belongs to an earlier line of the script, and runs that from its "
    "first line again"
)
NO_TASKS = StepMean(loss=0.0)
TOLD_CHARS_MAX = 1000  # limit for an agreed value in the ledger


class TaskRunner:
    """Begins and ends tasks: gradients, buffers and clocks around the script's own computing."""

    def __init__(
        self,
        driver: Driver,
        data: StepData,
        keeps_all_buffers: bool,
        inner: InnerGroup | None = None,
        files: TaskFiles | None = None,
    ) -> None:
        self._files = files  # None: files are not watched
        self.inner = inner  # the other processes of this worker
        self._driver = driver
        self._data = data
        self._keeps_all = keeps_all_buffers  # virtual rank 0 may be dropped
        self._use = TimeUse.TASK  # use of time that goes on after a repeated run

    def load(self, read: Callable[[], Any]) -> Any:
        """Return the batch that `read` reads; the time is counted as loading of data."""
        before = self._driver.times.enter(TimeUse.DATA)
        batch = read()
        self._driver.times.enter(before)
        return batch

    def begin(self, task: ef.Compute, *, repeated: bool = False, sketch: bool = False) -> None:
        """Begin a task of the script's, which may be `repeated`; `sketch`: one is wanted."""
        data = self._data
        if task.purpose is Purpose.HOSTED:
            data.clock.begin()
        wanted = task.digest and task.near
        bits = repeated or (task.digest and not wanted)
        self._start(task.step, sketch=sketch or wanted, bits=bits)
        data.gradients.begin_task(task.vrank, task.purpose)

    def begin_repeat(self, task: ef.Compute, *, sketch: bool) -> None:
        """Record that the script is about to compute a task only to compare its result."""
        self._use = self._driver.times.enter(TimeUse.CHECK)
        self._start(task.step, bits=True, sketch=sketch)
        self._data.gradients.begin_task(task.vrank, Purpose.AUDITED)

    def end_repeat(self) -> tuple[int, Sketch]:
        """End such a task; returns 63 bits of the gradient, and its sketch if it was wanted."""
        data = self._data
        self._finish()
        self._driver.times.enter(self._use)
        return data.digest.bits, data.digest.sketch

    def _start(self, step: int, *, bits: bool, sketch: bool) -> None:
        self._data.buffers.restore()
        self._data.attributes.begin_task()
        self._data.digest.begin(bits=bits, sketch=sketch, step=step)
        if self._files is not None:
            self._files.begin_task()

    def _finish(self) -> None:
        self._data.gradients.end_task()
        self._data.attributes.end_task()
        if self._files is not None:
            self._files.end_task()

    def backward_pass(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context that takes in one backward pass; `last`: the last one of its task."""
        return self._data.gradients.backward_pass(last=last)

    def end(self, task: ef.Compute, finished: FinishedTask) -> FinishedTask:
        """Record that the script has computed its task; return it with buffers and digests."""
        data, vrank = self._data, task.vrank
        self._finish()
        if task.purpose is Purpose.HOSTED:
            current.probe.handle_task(task.step, vrank)
            data.clock.end()
        first = vrank == 0 or self._keeps_all
        if first and len(data.buffers) and task.purpose is not Purpose.AUDITED:
            finished = replace(finished, left=data.buffers.changes())
        bits, sketch, part = data.digest.bits, data.digest.sketch, data.digest.part()
        gradient: Digest | None = None
        if task.digest:
            gradient = tuple(sketch) if task.near else bits ^ finished.report.digest
        return replace(finished, gradient=gradient, bits=bits, sketch=sketch, part=part)

    def report(self, task: ef.Compute, finished: FinishedTask) -> None:
        """Post to the machine that a task has ended."""
        data, driver, vrank = self._data, self._driver, task.vrank
        with driver.monitor:
            if task.purpose is Purpose.HOSTED:
                self.put(vrank, finished)
            elif task.purpose is Purpose.SPECULATIVE:
                data.speculative.keep(vrank, finished)
            digest = finished.gradient if task.digest or finished.gradient == FICKLE else None
            if finished.report.bad and isinstance(digest, int):
                digest = SUBSTITUTED
            driver.post(ev.TaskDone(task.step, vrank, task.purpose, finished.count, digest))

    def means(
        self, weights: Sequence[float], losses: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return the worker's weights and losses: the means over its processes."""
        if self.inner is None:
            return list(weights), list(losses)
        found = self.inner.means([*weights, *losses])
        return found[: len(weights)], found[len(weights) :]

    def is_set_anywhere(self, flag: bool) -> bool:
        """Return whether the flag is set in any process of this worker."""
        return flag if self.inner is None else self.inner.is_set_anywhere(flag)

    def join_digests(self, digests: Sequence[int]) -> list[int]:
        """Return joint digests over the processes of this worker; 0 where all of them have 0."""
        return list(digests) if self.inner is None else self.inner.join_digests(digests)

    def take_from_first(self, told: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the values that the process of shard 0 has received."""
        if self.inner is None:
            return dict(told)
        data = self.inner.take_from_first(msgspec.msgpack.encode(dict(told)))
        return msgspec.msgpack.decode(data, type=dict[int, bytes])

    def begin_values(self) -> None:
        """Restore the step's buffers before a task of a step that exchanges values."""
        self._data.buffers.restore()

    def tell(self, task: ef.Compute, value: bytes | None) -> None:
        """Record the result of a task of a step that exchanges values."""
        current.probe.handle_task(task.step, task.vrank)
        with self._driver.monitor:
            if value is not None:
                self._data.values.put(task.vrank, value)
            self.put(task.vrank, FinishedTask(loss=0.0, count=0, digest=0))
            self._driver.post(ev.TaskDone(task.step, task.vrank, task.purpose, 0))

    def put(self, vrank: int, finished: FinishedTask) -> None:
        """Record the row of a task that this worker hosts."""
        me, data = self._driver.status(), self._data
        host = me.worker, me.incarnation
        if data.kind is StepKind.GRADIENTS:
            data.values.put_report(vrank, finished.report.encode())
        row = finished.loss, finished.count, finished.digest, host, finished.weight, finished.part
        data.own.put(vrank, *row)
        if finished.left is not None:
            data.buffers.keep(vrank, finished.left)

    def settle_rows(self, progress: ScriptState) -> None:
        """Update rows of tables that still wait for it after a step, or drop their gradients."""
        text = progress.row_updates.settle(progress.steps)
        if text and self._driver.leads:
            self._driver.post(ev.EventNoted("tables", text))

    def adopt(self, vrank: int) -> None:
        """Record that a speculative task is this worker's own task now."""
        me = self._driver.status()
        with self._driver.monitor:
            report = self._data.speculative.adopt(vrank, (me.worker, me.incarnation))
            self._data.values.put_report(vrank, report)


class ScriptThread:
    """Runs the job's loops as the machine orders."""

    def __init__(
        self,
        driver: Driver,
        data: StepData,
        runner: TaskRunner,
        guard: ScriptGuard,
        mover: StateMover,
        recorder: LedgerRecorder,
        progress: ScriptState,
    ) -> None:
        self.runner = runner
        self.progress = progress
        self.epoch_start = EpochStart(progress, guard.loaded)
        self._driver = driver
        self._data = data
        self.guard = guard
        self._mover = mover
        self._recorder = recorder
        self._loop_data: LoopData  # data of the present loop
        self._plan: Plan  # plan of these data
        self._marks: tuple[list[int], list[int]] = ([], [])  # sample counts and digests of the turn
        self._loop = -1  # the number of the loop that was entered last
        self.in_loop = False  # true also when the script has left a loop that is not over yet
        self._planned = False  # the present loop's plan is known
        self._passed = False  # the loop that was left last was over before
        self._first: int | None = None  # the loop in which this worker has begun its first step
        self._at = 0  # the job's step that is open, or is opened next
        self._rested = True  # a boundary lies before that step
        self._whole = False  # the step fingerprints the whole state
        self.is_open = False  # not all tasks of the step are done
        self.is_yielding = False  # the script is in the body of a loop
        # reports of the last step's tasks, by virtual rank
        self.reports: Mapping[int, TaskReport] = {}

    # ------------------------------------------------------------ loops

    @property
    def number(self) -> int:
        """Return the number of the loop that was entered last, from 0."""
        return self._loop

    @property
    def begins_at(self) -> int:
        """Return after how many steps the loop before the script's next one has ended."""
        ended = self.progress.ended[: self._loop + 1]
        return ended[-1] if ended else 0

    def loop(self, data: LoopData, ends: LoopEnd) -> Iterator[tuple[int, Plan]]:
        """Yield the script's steps in one loop, starting from the job's present step."""
        self._enter_loop(data)
        progress = self.progress
        while self._wait_for_step(lambda: progress.stopped or ends.is_over(progress.steps)):
            self._whole |= ends.is_last(progress.steps)
            self._driver.times.note_left(ends.count_left(progress.steps))
            self.is_yielding = True
            try:
                yield progress.steps, self._plan
            finally:
                self.is_yielding = False
            self.end_turn()
        self._driver.times.note_left(0)
        self.leave_loop()

    def end_turn(self) -> None:
        """Record that the script has finished a step, or has left the loop after it."""
        step, (counts, digests) = self.progress.steps, self._marks
        self._loop_data.advance(step, counts, digests)
        if self._loop_data.quarantine is not None:
            self._loop_data.quarantine.settle(step)
        self.progress.steps = step + 1

    @property
    def hosted(self) -> tuple[int, ...]:
        """Return the virtual ranks that this worker hosts in the present step."""
        return self._driver.status().hosted

    @property
    def acts(self) -> bool:
        """Return whether this worker acts for the job after the committed step.

        The leader of the view in which the step was reduced does. So all agree on the worker, and
        no other takes its place in that step.
        """
        return self._data.acts

    def leave_loop(self) -> None:
        """End the present loop, but do not wait in one that was over before the script reached it.

        A worker that joins passes such loops without waiting.
        """
        progress = self.progress
        self.in_loop = False
        self._passed = self._loop < len(progress.ended)
        if self._planned:
            self._recorder.end()
        if not self._passed:
            if self._first is not None and self._first < self._loop:
                self.guard.loaded.load_again()  # it had no step before which to load it
            self.guard.loaded.forget()
            progress.ended.append(progress.steps)
            self._wait_for_release()

    def end_script(self) -> None:
        """Wait for the leader's end, as in a loop's end, also if the last loop was passed."""
        if self._passed:
            self._passed = False
            self._wait_for_release()
        self._driver.times.close()

    def _wait_for_release(self) -> None:
        """Wait for others at a loop's end, and for saves that are under way."""
        driver, line = self._driver, name_line()
        driver.post(ev.LoopFinishing(line))
        view = driver.view
        if self._data.sharding is not None and view is not None:
            self._data.sharding.meet(view.rank(view.leader))
        driver.times.enter(TimeUse.END)
        self._mover.finish()
        self._recorder.wait()
        driver.post(ev.LoopEnded(line))
        while not isinstance(driver.next_for_script(), ef.Release):
            pass

    def exchange_once(self, data: LoopData, tell: Callable[[], bytes]) -> bytes:
        """Exchange values between loops, in a loop of its own; return the exchanged bytes."""
        self._enter_loop(data)
        progress, number = self.progress, self._loop
        if self._wait_for_step(lambda: number in progress.told):
            progress.told[number] = tell()
        self.leave_loop()
        return progress.told[number]

    def _enter_loop(self, data: LoopData) -> None:
        self._loop_data, self.in_loop, self._planned = data, True, False
        self._loop += 1
        self._driver.post(ev.LoopEntered(self.guard.is_exact))

    def _wait_for_step(self, ends: Callable[[], bool]) -> bool:
        """Wait at the boundary; return whether the loop has another step."""
        if self._first is not None:
            self._make_plan()
            if self._is_over(ends):
                return False
            if self._first < self._loop:  # lines between loops may have changed the received state
                self.guard.loaded.load_again()
        driver = self._driver
        self.progress.trained.scatter()
        driver.post(ev.AtBoundary())
        next_order = partial(self.guard.next_order, driver)
        while not isinstance(order := self._recorder.rest(next_order), ef.Begin):
            if isinstance(order, ef.CopyState):
                self.progress.row_updates.write()
                driver.post(self._mover.copy(order))
        self._first = self._loop if self._first is None else self._first
        if self._loop > len(self.progress.ended):
            self.start_again(STATE_OF_EARLIER_LINE)
        self._rested = True
        self._at, self._whole, self.guard.joined = order.step, order.whole, order.joined
        self._make_plan()
        return not self._is_over(ends)

    def start_again(self, reason: str, *, is_wrong: bool = False) -> NoReturn:
        """End this process for a reason; `is_wrong`: it has computed wrongly.

        Another process takes its place, and runs the script from its first line.
        """
        if is_wrong:
            self._driver.post(ev.EventNoted("wrong", reason, self._driver.status().worker))
        self._driver.end_process(LEFT_WRONG if is_wrong else reason)
        while True:
            self._driver.next_for_script()

    def _make_plan(self) -> None:
        """Make the present loop's plan, once the number of steps before it is known."""
        if not self._planned:
            ended = self.progress.ended[: self._loop]
            plan = self._loop_data.begin(ended[-1] if ended else 0)
            if isinstance(plan, SamplePlan):
                plan = replace(plan, packed=self.progress.places.packed)
            self._plan = plan
            self._planned = True
            _check_data(self._driver, self.progress, self._loop, self._loop_data.facts)
            self._recorder.begin(self._plan, self._loop_data.quarantine)

    def _is_over(self, ends: Callable[[], bool]) -> bool:
        return self._loop < len(self.progress.ended) or ends()

    # ------------------------------------------------------------ steps

    def open(
        self,
        kind: StepKind = StepKind.GRADIENTS,
        of: Collection[str] | None = None,
        proposal: bytes | None = None,
        act: str = TRAINS,
    ) -> int:
        """Open the job's next step, and return its number.

        `of`: names of the modules whose gradients it sums; None: all. `proposal`: the leader's
        proposal in a step that exchanges values. `act`: what the workers do together in the step,
        the same words on all of them. UserError within another step.
        """
        if self.is_open:
            raise UserError(
                "a step is not complete: go through all its batches before a call that workers "
                "make together (evaluate, agree, another round)"
            )
        data, guard = self._data, self.guard
        current.probe.boundary(self._at, guard.prints.protected)
        rows = self.progress.row_updates
        if kind is StepKind.GRADIENTS or not rows.waits_for_script:
            self.runner.settle_rows(self.progress)
        rows.write()
        if kind is StepKind.GRADIENTS:
            trained = self.progress.trained
            if (found := trained.look(of)) is not None:
                by_row = rows.group(trained.row_parameters())
                data.replan(found, by_row)
                guard.prints.forget()
            _tell_new_names(self._driver, trained.find_new_names(looks=found is not None))
            data.gradients.begin_step(of)
        else:
            data.gradients.sit_out()
        data.buffers.remember()
        copied, start = self._mover.copied_fingerprint(self._at), data.buffers.start
        in_data = kind is StepKind.GRADIENTS and bool(self._loop_data.facts)
        first = in_data and self.progress.steps == self.begins_at
        prints = guard.open(
            self._at, start, self._loop_data, whole=self._whole, first=first, copied=copied
        )
        with self._driver.monitor:
            which = f" {', '.join(sorted(of))}" if of is not None else ""
            data.open(Act(f"{act}{which}", self._loop, name_line(), kind), prints)
            if proposal is not None:
                data.values.put(PROPOSAL, proposal)
            self._driver.post(ev.StepOpened(self._at, kind, self._rested, data.act.line))
        self.is_open, self._rested, self._whole = True, False, False
        return self._at

    def tasks(self, source: Source | None = None, until: int = 0) -> Iterator[ef.Compute]:
        """Yield the tasks of the open step, until it is committed.

        `source`: loads batches of this worker's tasks ahead, up to the script's step `until`.
        """
        followed: tuple[int, ...] = ()
        while True:
            order = self.guard.next_order(self._driver)
            match order:
                case ef.Adopt(vrank):
                    self.runner.adopt(vrank)
                case ef.Compute():
                    hosted = self.hosted
                    if source and order.purpose is Purpose.HOSTED and hosted != followed:
                        followed = hosted
                        source.follow(hosted, self.progress.steps, until)
                    yield order
                case ef.Commit():
                    self.guard.close()
                    self.is_open = False
                    self._at += 1
                    return
                case _:
                    raise InvariantError(f"{order} came in the middle of a step")

    def finish(self, *, first: bool) -> float:
        """Hand the committed step's gradient and buffers to the script; return its loss.

        `first`: it is the first one of the script's step.
        """
        data, plan, index = self._data, self._plan, self.progress.steps
        self._mover.wait_before_update()
        self.reports = {v: read_report(told) for v, told in sorted(data.values.told.items())}
        self._quarantine()
        self.progress.rank_states.commit(self.reports)
        data.buffers.apply()
        table, counts = data.table, data.table.counts()
        counted = sum(counts)
        samples = plan.step_samples(index) if isinstance(plan, SamplePlan) else counted
        if not counted:
            raise UserError(f"no shard of the stream has any sample for step {index}")
        told, total = "", data.digest_sum(self._at - 1)
        if first:
            self._marks = counts, table.digests()
            told = self._loop_data.check(index, *self._marks)
        weights, losses = self.runner.means(table.weights(), table.losses())
        mean = find_mean(plan, index, counts, weights, losses)
        data.gradients.publish(table.used, mean.scale, mean.weight)
        self.progress.row_updates.hold()
        enter_stream(plan.seed, index, plan.virtual_ranks, "job" if first else f"job {self._at}")
        uses = Uses.SAMPLES if first else Uses.SAME_SAMPLES
        self._record(uses, mean, samples - counted, told, total)
        return mean.loss

    def values_of_all(self) -> dict[int, bytes]:
        """Return the values of all members in the committed step, by virtual rank."""
        data = self._data
        self._mover.wait_before_update()
        data.buffers.restore()
        self.reports = {}
        told = self.runner.take_from_first(data.values.told)
        self._record(Uses.NO_SAMPLES, NO_TASKS, 0, agreed_text(told.get(PROPOSAL)))
        return told

    def modules_named(self, names: Collection[str]) -> Collection[str]:
        """Return these names; UserError for a name without a module that has parameters."""
        known = self.progress.trained.owners
        for name in names:
            if name not in known:
                raise UserError(
                    f"step.round({name!r}): no module with parameters is protected under that "
                    f"name, but {', '.join(sorted(known))}"
                )
        return names

    def stop(self) -> None:
        """Have all loops of all workers end after the next step."""
        self._data.wants_stop = True

    def _quarantine(self) -> None:
        """Quarantine the records that tasks of the step had to leave out. UserError if too many."""
        quarantine = self._loop_data.quarantine
        told = {vrank: report.bad for vrank, report in self.reports.items() if report.bad}
        if quarantine is None or not told:
            return
        news = quarantine.hear(told)
        self._recorder.report_quarantined(quarantine, news, self._data.table)
        found = sum(len(records) for records in self.progress.places.quarantined.values())
        total = found + len(quarantine.waiting)
        if news and total > quarantine.most:
            bad = [each for told in news.values() for each in told.items()]
            raise UserError(reason_to_stop(bad, total, quarantine.most))

    def _record(
        self, uses: Uses, mean: StepMean, dropped: int, told: str = "", total: int = 0
    ) -> None:
        """Write the step's line of the ledger; `total`: digest of its sum, if it has one."""
        self.progress.stopped |= self.runner.is_set_anywhere(self._data.table.stops)
        place = Place(self._at - 1, self.progress.steps, uses, told)
        handed = {v: report.digest for v, report in self.reports.items() if report.digest}
        data = self._data
        digests = StepDigests(state=data.prints[0])
        if total:
            *gradients, total = self.runner.join_digests([*data.table.gradients(), total])
            digests = replace(digests, gradients=gradients, sum=total)
        view = data.reduced_in
        self._recorder.commit(place, view, data.table, mean, dropped, handed, digests)


def _check_data(driver: Driver, progress: ScriptState, loop: int, facts: Facts) -> None:
    """Compare a loop's data with those with which the job has begun it. UserError.

    The bits of a sample may depend on the kind of processor: other ones are only told.
    """
    name, text = progress.places.compare(loop, facts, driver.status().worker)
    if text and not name.startswith("sample "):
        raise UserError(text)
    if text and driver.leads:
        driver.post(ev.EventNoted("script", text))


def _tell_new_names(driver: Driver, names: Sequence[str]) -> None:
    """Name the added parameters and buffers in the event log."""
    if names and driver.leads:
        driver.post(ev.EventNoted("script", ADDED.format(names=join_names(names, SHOWN))))


def agreed_text(proposal: bytes | None) -> str:
    """Return the ledger's text for an agreed value: as JSON, cut short."""
    if proposal is None:
        return ""
    return msgspec.json.encode(msgspec.msgpack.decode(proposal)).decode()[:TOLD_CHARS_MAX]
