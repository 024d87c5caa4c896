"""Runs the steps of a script's loops: tasks, the committed gradient, the line of the ledger.

It computes tasks, applies committed gradients and copies its share of the state when ordered; it
never takes part in the exchange itself. A step of the script is one step of the job, or several
that follow each other with no boundary between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import msgspec

from holdfast.engine.core.errors import InvariantError, UserError, require
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Digest, Purpose, StepKind
from holdfast.engine.core.step.audit import FICKLE, SUBSTITUTED, Sketch
from holdfast.engine.records.ledger import Place, StepDigests, Uses
from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.data.batch_tasks import Source
from holdfast.engine.train.data.quarantine import reason_to_stop
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import LoopData, Plan
from holdfast.engine.train.script.ledger_recorder import LedgerRecorder, StepMean, find_mean
from holdfast.engine.train.script.script_guard import ScriptGuard
from holdfast.engine.train.script.script_source import join_names, name_line
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.script.task_effects import TaskFiles
from holdfast.engine.train.shards.inner_group import InnerGroup
from holdfast.engine.train.step.driver import LEFT_WRONG, Driver
from holdfast.engine.train.step.mover import StateMover
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.reduction import Act
from holdfast.engine.train.step.step_data import FinishedTask, StepData
from holdfast.engine.train.step.step_table import TaskHost
from holdfast.engine.train.step.trained import SHOWN
from holdfast.engine.train.step.values import PROPOSAL, TaskReport, read_report

ADDED = (
    "the script has added {names} after its first step: a worker that joins runs the script from "
    "its first line and lacks them, so the job ends at its next join; build all layers before the "
    "first step, and freeze those that are trained later"
)
TRAINS = "trains"
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
        #: The other processes of this worker.
        self.inner = inner
        self._driver = driver
        self._data = data
        self._keeps_all = keeps_all_buffers  # virtual rank 0 may be dropped
        #: The use of time to return to after a repeated run.
        self._use = TimeUse.TASK

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

    def report_value(self, task: ef.Compute, value: bytes | None) -> None:
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
        host = TaskHost(me.worker, me.incarnation)
        if data.kind is StepKind.GRADIENTS:
            data.values.put_report(vrank, finished.report.encode())
        finished.write(vrank, data.own, data.buffers, host)

    def settle_rows(self, progress: ScriptState) -> None:
        """Update rows of tables that still wait for it after a step, or drop their gradients."""
        text = progress.row_updates.settle(progress.steps)
        if text and self._driver.leads:
            self._driver.post(ev.EventNoted("tables", text))

    def adopt(self, vrank: int) -> None:
        """Record that a speculative task is this worker's own task now."""
        me = self._driver.status()
        with self._driver.monitor:
            report = self._data.speculative.adopt(vrank, TaskHost(me.worker, me.incarnation))
            self._data.values.put_report(vrank, report)


@dataclass(slots=True)
class PresentLoop:
    """Is the loop that the script has entered last. `number`: from 0."""

    number: int = -1
    #: Set as the loop is entered.
    data: LoopData = field(default_factory=LoopData)
    #: The plan of the data; None until the number of steps before the loop is known.
    plan: Plan | None = None

    @property
    def found_plan(self) -> Plan:
        """Return the plan of a loop that has steps."""
        require(self.plan is not None, "a loop has no plan before its first step")
        assert self.plan is not None
        return self.plan


class StepRunner:
    """Runs the steps of the present loop as the machine orders."""

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
        self.guard = guard
        self.progress = progress
        self.recorder = recorder
        self.loop = PresentLoop()
        #: Not all tasks of the step are done.
        self.is_open = False
        #: Reports of the last step's tasks, by virtual rank.
        self.reports: Mapping[int, TaskReport] = {}
        #: Sample counts and digests of the script's step, by virtual rank.
        self.marks: tuple[list[int], list[int]] = ([], [])
        #: The step fingerprints the whole state.
        self.whole = False
        #: The job's step that is open, or is opened next.
        self.at = 0
        self._driver = driver
        self._data = data
        self._mover = mover
        self._rested = True  # a boundary lies before that step

    def begin(self, order: ef.Begin) -> None:
        """Leave a boundary, to open the ordered step."""
        self._rested = True
        self.at, self.whole, self.guard.joined = order.step, order.whole, order.joined

    @property
    def begins_at(self) -> int:
        """Return after how many steps the loop before the script's next one has ended."""
        ended = self.progress.ended[: self.loop.number + 1]
        return ended[-1] if ended else 0

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

    def start_again(self, reason: str, *, is_wrong: bool = False) -> NoReturn:
        """End this process for a reason; `is_wrong`: it has computed wrongly.

        Another process takes its place, and runs the script from its first line.
        """
        if is_wrong:
            self._driver.post(ev.EventNoted("wrong", reason, self._driver.status().worker))
        self._driver.end_process(LEFT_WRONG if is_wrong else reason)
        while True:
            self._driver.next_for_script()

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
                "a step is not complete: go through all its batches, without `break`, before a "
                "call that workers make together (evaluate, agree, another round)"
            )
        data, guard = self._data, self.guard
        current.probe.boundary(self.at, guard.fingerprints.protected)
        rows = self.progress.row_updates
        if kind is StepKind.GRADIENTS or not rows.waits_for_script:
            self.runner.settle_rows(self.progress)
        self.progress.service.write()
        if kind is StepKind.GRADIENTS:
            trained = self.progress.trained
            if (found := trained.look(of)) is not None:
                by_row = rows.group(trained.row_parameters())
                data.replan(found, by_row)
                guard.fingerprints.forget()
            _log_new_names(self._driver, trained.find_new_names(looks=found is not None))
            data.gradients.begin_step(of)
        else:
            data.gradients.sit_out()
        data.buffers.remember()
        copied, start = self._mover.copied_fingerprint(self.at), data.buffers.start
        in_data = kind is StepKind.GRADIENTS and bool(self.loop.data.facts)
        first = in_data and self.progress.steps == self.begins_at
        fingerprints = guard.open(
            self.at, start, self.loop.data, whole=self.whole, first=first, copied=copied
        )
        with self._driver.monitor:
            which = f" {', '.join(sorted(of))}" if of is not None else ""
            opened = Act(f"{act}{which}", self.loop.number, name_line(), kind)
            data.open(opened, fingerprints)
            if proposal is not None:
                data.values.put(PROPOSAL, proposal)
            self._driver.post(ev.StepOpened(self.at, kind, self._rested, data.act.line))
        self.is_open, self._rested, self.whole = True, False, False
        return self.at

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
                    self.at += 1
                    return
                case _:
                    raise InvariantError(f"{order} came in the middle of a step")

    def finish(self, *, first: bool) -> float:
        """Hand the committed step's gradient and buffers to the script; return its loss.

        `first`: it is the first one of the script's step.
        """
        data, plan, index = self._data, self.loop.found_plan, self.progress.steps
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
        told, total = "", data.digest_sum(self.at - 1)
        if first:
            self.marks = counts, table.digests()
            told = self.loop.data.check(index, *self.marks)
        weights, losses = self.runner.means(table.weights(), table.losses())
        mean = find_mean(plan, index, counts, weights, losses)
        data.gradients.publish(table.used, mean.scale, mean.weight)
        self.progress.row_updates.hold()
        enter_stream(plan.seed, index, plan.virtual_ranks, "job" if first else f"job {self.at}")
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
        """End all loops of all workers after the next step."""
        self._data.wants_stop = True

    def _quarantine(self) -> None:
        """Quarantine the records that tasks of the step had to leave out. UserError if too many."""
        quarantine = self.loop.data.quarantine
        told = {vrank: report.bad for vrank, report in self.reports.items() if report.bad}
        if quarantine is None or not told:
            return
        news = quarantine.take_reports(told)
        self.recorder.report_quarantined(quarantine, news, self._data.table)
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
        place = Place(self.at - 1, self.progress.steps, uses, told)
        handed = {v: report.digest for v, report in self.reports.items() if report.digest}
        data = self._data
        digests = StepDigests(state=data.fingerprints.part)
        if total:
            *gradients, total = self.runner.join_digests([*data.table.gradients(), total])
            digests = replace(digests, gradients=gradients, sum=total)
        view = data.reduced_in
        self.recorder.commit(place, view, data.table, mean, dropped, handed, digests)


def _log_new_names(driver: Driver, names: Sequence[str]) -> None:
    """Name the added parameters and buffers in the event log."""
    if names and driver.leads:
        driver.post(ev.EventNoted("script", ADDED.format(names=join_names(names, SHOWN))))


def agreed_text(proposal: bytes | None) -> str:
    """Return the ledger's text for an agreed value: as JSON, cut short."""
    if proposal is None:
        return ""
    return msgspec.json.encode(msgspec.msgpack.decode(proposal)).decode()[:TOLD_CHARS_MAX]
