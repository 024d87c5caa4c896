"""Carries out the orders of the present view's group, one after the other in its own thread.

It builds the group, brings joiners up to date, sums buckets and exchanges messages between all
members. It takes no decision: it reports each finished order as an event, and a failure as a broken
group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.effects import SumStage
from holdfast.engine.core.ground.events import Doubt, StepKind, Topic
from holdfast.engine.core.types import Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.train.exchange.layout import (
    TAG_AUDIT,
    TAG_VOTE,
    Layout,
    all_gather,
    gather_bytes,
)
from holdfast.engine.train.exchange.seam import AloneTransport, Rendezvous, Transport, Waits
from holdfast.engine.train.step.bucket_sums import BucketSum
from holdfast.engine.train.step.buckets import FilledBuckets
from holdfast.engine.train.step.driver import Driver, EngineOrder, Link, ViewRendezvous
from holdfast.engine.train.step.late_members import NONE_AWAITED, BackupMessages, LateSearch
from holdfast.engine.train.step.mover import PromptOrder, StateMover, ViewConnections
from holdfast.engine.train.step.reduction import (
    ActCheck,
    BuffersSpread,
    Operation,
    TableGather,
    advance_all,
)
from holdfast.engine.train.step.row_sums import RowsSum
from holdfast.engine.train.step.state_differences import explain, summarize
from holdfast.engine.train.step.step_data import StepData
from holdfast.engine.train.step.step_table import TaskHost
from holdfast.engine.train.step.sum_runs import BucketRuns, RowRuns, digest_all
from holdfast.engine.train.step.values import ValuesGather

NOT_TOLD = b"-"  # from members without a state to describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Configures the meeting with other processes: identity, transport and fingerprint."""

    me: Peer
    make_transport: Callable[[], Transport]
    #: Returns the fingerprint of the whole state.
    fingerprint: Callable[[], int]
    # Returns a description of the state, by which other members find a difference.
    describe: Callable[[], bytes]
    #: Steps may do without the last members.
    backs_up: bool


@dataclass(slots=True)
class TimedConnections(ViewConnections):
    """Keeps this worker's part in one view, and measures its waits for other members."""

    waits: Waits = field(default_factory=lambda: Waits(time.perf_counter))


class Engine(threading.Thread):
    """Runs the thread that the module describes. `start` it once all objects are protected."""

    def __init__(
        self,
        driver: Driver,
        link: Link,
        data: StepData,
        filled: FilledBuckets,
        mover: StateMover,
        exchange: Exchange,
        note_doubt: Callable[[int, int, bool], None],
    ) -> None:
        super().__init__(name="holdfast-engine", daemon=True)
        self._driver = driver
        self._link = link
        self._data = data
        self._filled = filled
        self._mover = mover
        self._exchange = exchange
        self._note_doubt = note_doubt
        self._rows: TableGather | None = None  # the table of the step that is being summed
        self._rows_step = -1  # the newest step whose table was begun
        self._search: LateSearch | None = None
        # The sums of the present step: buckets first, and then rows.
        self._sums: list[BucketSum | RowsSum] = []
        self._runs: BucketRuns | RowRuns | None = None  # the runs of the sum that is checked
        self._in: TimedConnections | None = None
        self._unlike: tuple[str, ...] = ()  # tensors that differed the last time that any did

    def run(self) -> None:
        """Carry out orders for ever."""
        while True:
            order = self._driver.next_for_engine()
            view = order.view.number if isinstance(order, ef.Install) else order.view
            try:
                self._carry_out(order)
            except Aborted as error:
                self._leave()
                if self._driver.failure is not None:
                    # This worker can use no further view. If it gave up each of them, the job would
                    # begin one after another until its process has ended.
                    return
                peer = _find_worker(self._driver.view, view, error.rank)
                self._driver.post(ev.GroupBroken(view, str(error), peer))
            except BaseException as error:  # noqa: BLE001 - the script's thread raises it
                # The group stays open until the process has ended with its message. If other
                # members missed it sooner, they would have it replaced, and its successor would
                # fail on the same state again and again.
                self._driver.fail(error)
                return

    def carry_out_now(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        """Carry out an effect that is not in order with the others, with the monitor held.

        Return the events that follow for the machine. The thread that posted an event calls it.
        """
        match effect:
            case ef.Redo():
                self._data.gradients.clear()
                self._data.reset()
            case ef.UseCorrectSum(_, digests):
                try:
                    self._put_right(digests)
                except Aborted as error:
                    return [ev.GroupBroken(ViewNumber(self._data.reduced_in), str(error))]
            case ef.NoteDoubt(step, view, again):
                self._note_doubt(step, view, again)
            case ef.LookWhoIsLate(_, step):
                if self._search is not None:
                    self._search.look(step)
            case _ if isinstance(effect, PromptOrder):
                return self._mover.carry_out_now(effect, self._in)
        return []

    def _awaited_rank(self, step: int) -> int:
        """Return the rank for which this member waits in a step; any thread may ask.

        Its own one if its tasks are not done; NONE_AWAITED if it waits for none.
        """
        at, rows = self._in, self._rows
        if at is None or step < self._rows_step or (rows is None and step == self._rows_step):
            return NONE_AWAITED
        if rows is None or step > self._rows_step:
            return at.layout.rank
        return NONE_AWAITED if rows.awaited is None else rows.awaited

    def _put_right(self, digests: Sequence[int]) -> None:
        """Use a correct run for each piece of the checked bucket. Aborted."""
        if self._runs is not None and self._in is not None:
            size = self._in.layout.size
            self._runs.put_right(digests[self._exchange.me.shard * size :][:size])

    # ------------------------------------------------------------ orders

    def _carry_out(self, order: EngineOrder) -> None:  # noqa: RET503
        if isinstance(order, ef.Install):
            return self._enter(order.view)
        at = self._in
        if at is None or at.view.number != order.view:
            return None  # the order's view has been given up
        self._driver.groups.check_alive(order.view)
        match order:
            case ef.Gather():
                self._gather(at, order)
            case ef.Reduce():
                self._reduce(at, order)
            case ef.CheckSum():
                self._check_sum(at, order)
            case ef.SendDone(_, step, samples):
                self._backup_of(at).send_done(step, samples)
            case ef.SendCounted(_, step, ranks):
                self._backup_of(at).send_counted(step, ranks)
            case _:
                for event in self._mover.carry_out(order, at):
                    if isinstance(event, ev.StatesCompared) and event.prints:
                        holders = [worker for worker, _ in event.prints]
                        self._explain(at, at.view.resume_step, holders)
                    self._driver.post(event)

    # ------------------------------------------------------------ the group

    def _enter(self, view: View) -> None:
        self._leave()
        driver = self._driver
        driver.groups.check_alive(view.number)
        alone = len(view.members) == 1
        transport = AloneTransport() if alone else self._exchange.make_transport()
        self._in = at = TimedConnections(view, Layout.of(view, self._exchange.me), transport)
        driver.groups.adopt(view.number, transport)
        self._open(view, at.layout, transport)
        if self._data.sharding is not None:
            self._data.sharding.enter(at.layout, transport)
        if self._exchange.backs_up:
            self._backup_of(at).listen()
        self._search = LateSearch(driver, view, at.layout, transport, self._awaited_rank)
        self._search.listen()
        at.waits.begin()
        driver.post(ev.Connected(view.number))

    def _backup_of(self, at: TimedConnections) -> BackupMessages:
        return BackupMessages(self._driver, at.view, at.layout, at.transport)

    def _leave(self) -> None:
        self._filled.end()
        self._rows = self._runs = self._search = None
        self._rows_step = -1
        if self._in is not None:
            self._in.transport.close()
            self._in = None

    def _open(self, view: View, layout: Layout, transport: Transport) -> None:
        """Connect in a thread of its own: a member that dies during it must not delay us."""
        rendezvous: Rendezvous = ViewRendezvous(
            self._driver, self._link, view, layout.addresses(view)
        )
        outcome: list[BaseException | None] = []
        monitor = self._driver.monitor

        def connect() -> None:
            try:
                transport.open(layout.rank, layout.size, rendezvous, layout.peers)
                result = None
            except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
                result = error
            with monitor:
                outcome.append(result)
                monitor.notify_all()

        threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
        with monitor:
            while not outcome:
                self._driver.groups.check_alive(view.number)
                monitor.wait()
        if outcome[0] is not None:
            raise outcome[0]

    # ------------------------------------------------------------ hearing all

    def _gather(self, at: TimedConnections, order: ef.Gather) -> None:
        row = order.row
        if order.topic is Topic.REPORT_FAULT:
            row = (*row, self._exchange.fingerprint())
        real = any(isinstance(word, float) for word in row)
        mine = torch.from_numpy(np.array(row, np.float64 if real else np.int64))
        tag = TAG_VOTE if order.topic is Topic.VOTE else TAG_AUDIT
        rows = all_gather(at.transport, at.layout, mine, tag).tolist()
        if order.topic is Topic.VOTE:
            at.waits.begin()
        heard = tuple(tuple(each) for each in rows)
        self._driver.post(ev.Gathered(order.view, order.topic, heard))

    def _check_sum(self, at: TimedConnections, order: ef.CheckSum) -> None:
        if order.question.stage is SumStage.COMPARE:
            first = self._sums[order.bucket]
            if isinstance(first, RowsSum):
                self._runs = RowRuns(first, at.layout)
            else:
                self._runs = BucketRuns(first, at.layout)
        assert self._runs is not None, "a sum is compared before it is disputed"
        rows = self._runs.answer(order.question, at.transport)
        answers = tuple(tuple(each) for each in rows)
        self._driver.post(ev.SumChecked(order.view, order.bucket, answers))

    # ------------------------------------------------------------ sums

    def _reduce(self, at: TimedConnections, order: ef.Reduce) -> None:
        """Run all operations of the step; ready ones overlap with the backward pass."""
        at.layout = layout = at.layout.with_owners(at.view, order.owners)
        buckets = self._data.gradients.active
        counts = layout.rank in order.counted
        if counts:
            self._filled.begin(layout.hosted[layout.rank], buckets)
        else:
            nodes = layout.nodes[layout.rank]
            self._filled.begin((), [bucket.replace_share(nodes) for bucket in buckets])
        begun, total = 0, len(buckets)
        running: list[BucketSum] = []
        sums: list[BucketSum] = []
        closing: list[Operation] = []
        check = self._checker(at)
        act = ActCheck(self._data.act, self._plan_of_step(), layout, at.view)
        while begun < total or running or not closing:
            # Where tags are ignored, a sum ends before the next one begins.
            while not (running and at.transport.ordered):
                bucket = self._filled.take(not running, check)
                if bucket is None:
                    break
                if not begun:  # just before the bucket: the peer is woken once for both
                    act.begin(at.transport)
                with self._driver.monitor:  # a newer view may merge the partial sums further
                    self._driver.groups.check_alive(order.view)
                    waits = None if at.transport.ordered else at.waits
                    started = BucketSum(bucket, layout, waits)
                begun += 1
                at.waits.begin_bucket()
                started.begin(at.transport)
                running.append(started)
                sums.append(started)
            # They are under way together with the last buckets.
            if begun == total and not closing:
                self._data.record_given(at.view.leader)
                closing = self._closing_operations(at, order, act.number)
                if not total:
                    act.begin(at.transport)
                for operation in closing:
                    operation.begin(at.transport)
            if running:
                act.complete(at.transport)
                running = advance_all(running, at.transport)
        act.complete(at.transport)
        left = closing
        while left:
            left = advance_all(left, at.transport)
        for operation in (*sums, *closing):
            operation.finish()
        self._sums = [*sums, *(each for each in closing if isinstance(each, RowsSum))]
        self._driver.post(self._report(at, order, self._sums))

    def _report(
        self, at: TimedConnections, order: ef.Reduce, sums: Sequence[BucketSum | RowsSum]
    ) -> ev.Summed:
        data, rows = self._data, self._rows
        assert rows is not None, "sums end with the rows"
        self._rows = None
        taken = [rows.fingerprints[rank] for rank in range(at.layout.size)]
        if any(len({each for each in kind if each}) > 1 for kind in zip(*taken, strict=True)):
            self._explain(at, order.step, at.view.workers)
        with self._driver.monitor:
            parts = data.table.gradients()
            unlike = data.speculative.contradicted_vranks(sums, data.values.told, parts)
            me, leader = self._exchange.me, at.view.leader
            leads = leader == me.worker and not me.shard
            data.record_reduced(order.view, leader=leader if leads else None)
        doubt = max((each.doubt() for each in sums), default=Doubt.FINITE)
        tensors = [tensor for each in sums for tensor in each.sums]
        return ev.Summed(
            view=order.view,
            step=order.step,
            buckets=len(sums),
            parts=tuple(each.part for each in taken),
            wholes=tuple(each.whole for each in taken),
            copies=tuple(each.copied for each in taken),
            doubt=doubt,
            bits=digest_all(tensors) if doubt != Doubt.FINITE else 0,
            unlike=unlike,
            compute_us=data.clock.step_us(),
            wait=at.waits.wait_of_step(),
        )

    def _explain(self, at: TimedConnections, step: int, holders: Sequence[WorkerId]) -> None:
        """Find, together with the other members, the differences between the holders' states.

        UserError if the script is at fault.
        """
        holds = at.view.workers[at.layout.rank] in holders
        mine = self._exchange.describe() if holds else NOT_TOLD
        told = zip(at.view.workers, gather_bytes(at.transport, at.layout, mine), strict=True)
        found = explain({w: text for w, text in told if w in holders}, step, self._unlike)
        self._unlike = found or self._unlike
        if found and at.layout.rank == 0:
            text = f"what differs in step {step}: {summarize(found)}"
            self._driver.post(ev.EventNoted("wrong", text))

    def _checker(self, at: TimedConnections) -> Callable[[], None]:
        """Return a function to call before a wait for the script: Aborted once the view is over."""

        def check() -> None:
            at.transport.go_on()
            self._driver.groups.check_alive(at.view.number)

        return check

    def _plan_of_step(self) -> int:
        """Return 63 bits that stand for the parameters that the step sums; 0: none."""
        is_sum = self._data.kind is StepKind.GRADIENTS
        return self._data.gradients.plan if is_sum else 0

    def _closing_operations(
        self, at: TimedConnections, order: ef.Reduce, act: int
    ) -> list[Operation]:
        """List the operations that must wait until this worker's tasks are complete, or dropped.

        `act`: the number of the step's act.
        """
        driver, data, layout = self._driver, self._data, at.layout
        mine = layout.hosted[layout.rank]
        at.transport.go_on()
        driver.await_rows(order.view, order.step)
        counts = layout.rank in order.counted
        if counts:
            data.table.take(mine, data.own)
            used = data.gradients.used
        else:
            me = driver.status()
            data.table.drop(mine, TaskHost(me.worker, me.incarnation))
            used = torch.zeros_like(data.table.used)
        with driver.monitor:
            values = ValuesGather(data.values, layout, at.view, counts=counts)
        self._rows = TableGather(data.table, used, layout, data.fingerprints, values.size, act)
        self._rows_step = order.step
        values.expect(self._rows.follows)
        operations: list[Operation] = [self._rows, values]
        if data.gradients.active_tables:
            with driver.monitor:
                driver.groups.check_alive(order.view)
                tables = data.gradients.active_tables
                operations.append(RowsSum.of(tables, layout, counts=counts))
        if data.kind is StepKind.GRADIENTS and len(data.buffers):
            operations.append(BuffersSpread(data.buffers, layout, order.counted))
        return operations


def _find_worker(present: View | None, number: int, rank: int | None) -> WorkerId | None:
    """Return the worker with this rank in the view of this number; None: not known."""
    if rank is None or present is None or present.number != number:
        return None
    return present.workers[rank]
