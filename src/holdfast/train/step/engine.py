"""The engine thread: builds each view's group, syncs joiners, reduces and votes, step after step.

It never decides anything about membership: when an exchange fails it says so and waits for the next
view. Partial sums live in the buckets, so a new view simply reduces them again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.core.errors import Aborted, Damaged, UserError, WorldError
from holdfast.core.invalidations import Invalidations
from holdfast.core.step import worker as machine
from holdfast.core.step.audit import Alike, Audit
from holdfast.core.step.backup import BackupPolicy
from holdfast.core.step.balance import BalancePolicy
from holdfast.core.step.speeds import Speeds
from holdfast.core.types import LateWorker, View
from holdfast.store.storage import Missing
from holdfast.train.checkpoint.restorer import Restorer
from holdfast.train.checkpoint.saver import Saver, say
from holdfast.train.checkpoint.transfer import StateSync
from holdfast.train.driver import Driver, Link, ViewRendezvous
from holdfast.train.step.backup_agreement import Agreement
from holdfast.train.step.buckets import Bucket
from holdfast.train.step.judging import Judge
from holdfast.train.step.missed_steps import MissedSteps
from holdfast.train.step.reduction import (
    CONTRADICTED,
    FINITE,
    RIGHTLY,
    TAG_AUDIT,
    BucketSum,
    BuffersSpread,
    Layout,
    Operation,
    TableGather,
    Vote,
    all_gather,
    vote,
)
from holdfast.train.step.step_state import StepState
from holdfast.train.step.waits import Waits
from holdfast.train.transport.seam import AloneTransport, Rendezvous, Transport

STORE_PAUSE_S = 1.0  # before another view tries a store that does not answer


class Engine(threading.Thread):
    """See the module's docstring. `start` it once everything is protected."""

    def __init__(
        self,
        driver: Driver,
        link: Link,
        step: StepState,
        protected: Mapping[str, Any],
        make_transport: Callable[[], Transport],
        restorer: Restorer | None = None,
        saver: Saver | None = None,
    ) -> None:
        super().__init__(name="holdfast-engine", daemon=True)
        self.rebalance = True  # slow workers host fewer virtual ranks; the same on all
        self.plan: Callable[[View, int], tuple[Audit, ...]] = lambda view, step: ()
        self.backup = BackupPolicy()
        self.judge = Judge(driver, step.audits, keeps=restorer is not None)
        self._restorer = restorer
        self._saver = saver
        self._driver = driver
        self._link = link
        self._step = step
        self._protected = protected
        self._make_transport = make_transport
        self._filled: deque[Bucket] = deque()
        self._missed = MissedSteps(step)
        self._waits: Waits  # of this view
        self._withdrawn: Invalidations = ()  # what this worker has removed from the store, or still does
        self._layout: tuple[object, Layout]  # of which view and owners, and what it is

    def run(self) -> None:
        served = 0
        self._step.gradients.on_filled = self._on_filled
        while True:
            view = self._next_view(served)
            served = view.number
            alone = len(view.members) == 1
            transport = AloneTransport() if alone else self._make_transport()
            try:
                self._serve(view, transport)
            except Aborted as error:
                self._driver.post(machine.GroupBroken(view.number, str(error)))
            except BaseException as error:  # noqa: BLE001 - the script's thread raises it
                self._driver.fail(error)
                return
            finally:
                transport.close()

    def _next_view(self, served: int) -> View:
        with self._driver.changed:
            while self._driver.view is None or self._driver.view.number <= served:
                self._driver.changed.wait()
            return self._driver.view

    def _serve(self, view: View, transport: Transport) -> None:
        driver, number = self._driver, view.number
        layout = Layout.of(view, driver.worker)
        self._layout = (number, view.owners), layout
        with driver.changed:
            self._step.awaited = list  # what an older view waits for has its ranks
        driver.adopt_group(number, transport)
        if self._saver is not None:
            self._saver.enter(view)
        self._open(view, layout, transport)
        self.judge.enter(view, layout, transport)
        if (
            self._restorer is not None
            and layout.rank == 0
            and view.invalidations != self._withdrawn
        ):
            self._withdraw(self._restorer, view.invalidations)
        if view.joiners:
            self._bring_up_to_date(view, layout, transport)
        self._missed.forget()
        self.judge.synced(bool(view.joiners))
        self._agree_on_audits(view, layout, transport)
        if self.backup.workers:
            self._begin_agreement(number, layout, transport)
        driver.post(machine.Synced(number))
        speeds = Speeds(view, BalancePolicy() if self.rebalance else None)
        self._waits = Waits(time.perf_counter)
        self._waits.begin()
        while True:
            step, layout = self._await_open_step(view)
            counted = self._who_counts(step, layout)
            doubt = self._reduce(layout, transport, number, counted)
            if self._step.audits.audits:
                self._await(view, lambda: not self._step.audits.owed(number))
            if not self.judge.accepts(step, layout, self._step.gradients.buckets):
                self._begin_anew(view)
                continue
            self._step.reduced_in = number
            if doubt != FINITE and self.judge.sure(step):
                doubt = RIGHTLY
            if doubt in (FINITE, RIGHTLY):
                driver.post(machine.Reduced(number, step))
            votes = vote(transport, layout, number, step, self._opinion(step, doubt))
            self._waits.begin()
            if self.judge.doubts(step, [v.doubt for v in votes]):
                driver.post(machine.Reopened(number, step))
                self._begin_anew(view)
                continue
            self._step.audits.alike = Alike(max(v.alike for v in votes))
            if any(v.save for v in votes) and not any(v.busy for v in votes):
                driver.save_after(step, view)
                self._step.audits.whole_step = step + 1
            if view.suspended:
                self._missed.keep(step, layout, number)
            compute_us, waits = [v.compute_us for v in votes], [v.wait for v in votes]
            for kind, text in speeds.observe(compute_us, driver.leads, waits):
                driver.post(machine.EventNoted(kind, text))
            pending = any(v.pending for v in votes)
            dropped = self._step.dropped and self._step.samples(layout.hosted[layout.rank]) is None
            driver.post(machine.Voted(number, step, pending, speeds.owners, dropped))

    def _begin_agreement(self, number: int, layout: Layout, transport: Transport) -> None:
        agreement = Agreement(self._driver, self.backup, number, layout, transport)
        agreement.start()
        with self._driver.changed:
            self._step.audits.alike = Alike.NOTHING  # what is dropped cannot be compared
            self._step.agreement = agreement
            self._driver.changed.notify_all()

    def _who_counts(self, step: int, layout: Layout) -> Sequence[int]:
        """The ranks whose results count. This worker adds zeros if its own do not."""
        agreement, mine = self._step.agreement, layout.hosted[layout.rank]
        if agreement is None:
            return range(layout.size)
        counted = agreement.settle(step, lambda: self._step.samples(mine))
        if layout.rank not in counted:
            nodes, buckets = layout.nodes[layout.rank], self._step.gradients.buckets
            with self._driver.changed:
                self._filled = deque(bucket.without_share(nodes) for bucket in buckets)
        return counted

    def _begin_anew(self, view: View) -> None:
        """The script computes the step once more."""
        step = self._step
        self._await(view, lambda: not step.copying)
        with self._driver.changed:
            step.gradients.begin_step()
            step.open(self._driver.committed)
            step.audits.again(self.judge.again)
            self._driver.changed.notify_all()

    def _bring_up_to_date(self, view: View, layout: Layout, transport: Transport) -> None:
        ranks, driver = {w: r for r, w in enumerate(view.workers)}, self._driver
        if not view.donors and view.resume_step:
            self._restore(view, layout, transport)
        donors, back = [ranks[w] for w in view.donors], [ranks[g.worker] for g in view.catching_up]
        for lag in view.catching_up:
            self._catch_up(view, lag, transport, donors)
        sync = StateSync(transport, layout, self._protected, lambda: driver.post(machine.Loading()))
        held = sync.run(donors, [ranks[w] for w in view.joiners if ranks[w] not in back], back)
        if held:
            self.judge.differ({view.workers[rank]: each for rank, each in held.items()})

    def _withdraw(self, restorer: Restorer, invalidations: Invalidations) -> None:
        """What is invalidated is removed from the store, beside the work, whenever the store answers."""
        self._withdrawn = invalidations

        def withdraw() -> None:
            while True:
                try:
                    restorer.withdraw(invalidations)
                    break
                except WorldError as error:
                    say(f"what is invalidated cannot be removed just now: {error}")
                    time.sleep(STORE_PAUSE_S)

        threading.Thread(target=withdraw, name="holdfast-withdraw", daemon=True).start()

    def _agree_on_audits(self, view: View, layout: Layout, transport: Transport) -> None:
        """A joiner does not know what the others have agreed on, nor who has missed a vote."""
        audits, step = self._step.audits, view.resume_step
        mine = torch.tensor([audits.alike, audits.whole_step == step], dtype=torch.int64)
        alike, whole = all_gather(transport, layout, mine, TAG_AUDIT).amax(dim=0).tolist()
        with self._driver.changed:
            audits.alike, audits.agreed_in = Alike(alike), view.number
            audits.whole_step = step if whole else -1

    def _opinion(self, step: int, doubt: int) -> Vote:
        driver, saver = self._driver, self._saver
        due = busy = False
        if saver is not None:
            due, busy = saver.due(step + 1) and driver.leads, saver.busy
        save = due or (saver is not None and driver.save_wanted)
        alike, wait = self._step.audits.alike, self._waits.told()
        compute_us = 0 if self._step.dropped else self._step.clock.step_us()
        return Vote(driver.pending, save, busy, alike, doubt, compute_us, wait)

    def _catch_up(
        self, view: View, lag: LateWorker, transport: Transport, donors: list[int]
    ) -> None:
        """A member that was late applies the steps that it has missed; the others send them."""
        driver, steps = self._driver, range(lag.committed, view.resume_step)
        me, to = view.workers.index(driver.worker), view.workers.index(lag.worker)
        if me in donors:
            self._missed.send(transport, to, steps, first=me == donors[0])
        if me != to:
            return
        for index in steps:
            self._await(view, partial(self._waits_in, index))
            self._missed.receive(transport, donors)
            driver.post(machine.CaughtUp(view.number, index))
        self._await(view, lambda: driver.at_rest)

    def _waits_in(self, index: int) -> bool:
        """Whether the script waits for the end of this step."""
        return self._step.index == index and self._driver.status().waiting

    def _await(self, view: View, ready: Callable[[], bool]) -> None:
        """Wait for the script. Aborted when the view is given up."""
        with self._driver.changed:
            while not ready():
                self._driver.check_alive(view.number)
                self._driver.changed.wait()

    def _restore(self, view: View, layout: Layout, transport: Transport) -> None:
        """Nobody holds the state any more: all members read it together."""
        step, driver, restorer = view.resume_step, self._driver, self._restorer
        if restorer is None:
            raise UserError(f"the job is to begin at step {step}, and has no --store")
        try:
            try:
                restorer.restore(step, transport, layout, lambda: driver.post(machine.Loading()))
            except (Damaged, Missing) as error:
                text = f"the checkpoint of step {step} is not used: {error}"
                say(text)
                driver.post(machine.EventNoted("rot", text))
                other = restorer.other_than(step, view.invalidations)
                driver.post(machine.Unreadable(view.number, step, other))
                raise Aborted(str(error)) from None
        except Aborted:
            raise
        except WorldError as error:  # it may answer again: the next view tries
            say(f"the checkpoint of step {step} cannot be read just now: {error}")
            time.sleep(STORE_PAUSE_S)
            raise Aborted(str(error)) from None

    def _open(self, view: View, layout: Layout, transport: Transport) -> None:
        """Connect in a thread of its own: a member that dies meanwhile must not hold us up."""
        rendezvous: Rendezvous = ViewRendezvous(self._driver, self._link, view)
        outcome: list[BaseException | None] = []

        def connect() -> None:
            try:
                transport.open(layout.rank, layout.size, rendezvous)
                result = None
            except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
                result = error
            with self._driver.changed:
                outcome.append(result)
                self._driver.changed.notify_all()

        threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
        with self._driver.changed:
            while not outcome:
                self._driver.check_alive(view.number)
                self._driver.changed.wait()
        if outcome[0] is not None:
            raise outcome[0]

    def _await_open_step(self, view: View) -> tuple[int, Layout]:
        """Wait until the script works on the step to be committed next; who hosts what in it."""
        driver, number = self._driver, view.number
        with driver.changed:
            while self._step.index != driver.committed:
                driver.check_alive(number)
                driver.changed.wait()
            driver.check_alive(number)
            hosted = set(driver.hosted())
            step, buckets = driver.committed, self._step.gradients.buckets
            if self._step.audits.view != number:  # the step was under way when the view was formed
                self._step.audits.plan(number, self.plan(view, step))
                driver.changed.notify_all()
            self._filled = deque(b for b in buckets if hosted <= b.contributed)
            owners = driver.owners
        if self._layout[0] != (number, owners):
            self._layout = (number, owners), Layout.of(view, driver.worker, owners)
        return step, self._layout[1]

    def _on_filled(self, bucket: Bucket) -> None:
        if set(self._driver.hosted()) <= bucket.contributed and not self._step.dropped:
            self._filled.append(bucket)
            self._driver.changed.notify_all()

    def _reduce(
        self, layout: Layout, transport: Transport, number: int, counted: Sequence[int]
    ) -> int:
        """All operations of the step; those that are ready overlap with the script's backward.

        Returns whether what was summed here is finite, as a vote says it.
        """
        begun, total = 0, len(self._step.gradients.buckets)
        gathering: deque[BucketSum] = deque()
        spreading: list[BucketSum] = []
        closing: list[Operation] = []
        while begun < total or gathering:
            only = begun if transport.ordered else None
            for bucket in self._take_filled(number, only, wait=not gathering):
                begun += 1
                with self._driver.changed:  # a newer view may merge the partial sums further
                    self._driver.check_alive(number)
                    started = BucketSum(bucket, layout)
                with self._waits.sending():
                    started.gather(transport)
                gathering.append(started)
            if begun == total and not closing:  # under way beside the last buckets
                closing = self._closing_operations(layout, number, counted)
                for operation in closing:
                    operation.gather(transport)
            if gathering:
                gathered = gathering.popleft()
                gathered.spread(transport, None if transport.ordered else self._waits)
                spreading.append(gathered)
        for operation in closing:
            operation.spread(transport)
        for operation in (*spreading, *closing):
            operation.finish()
        doubt = max((each.doubt() for each in spreading), default=FINITE)
        return doubt or self._compare_copies(spreading)

    def _compare_copies(self, sums: Sequence[BucketSum]) -> int:
        """Whoever was late has been first nevertheless: a copy of its task is an audit for free."""
        step = self._step
        with self._driver.changed:
            if step.audits.alike or len(step.audits.audits) == len(step.table.rows):
                return FINITE
            unlike = step.copies.contradicted(sums)
        for vrank in unlike:
            text = f"a copy of virtual rank {vrank} of step {step.index} came to other bits"
            self._driver.post(machine.EventNoted("wrong", f"{text}; the step is computed again"))
        return CONTRADICTED if unlike else FINITE

    def _take_filled(self, number: int, only: int | None, *, wait: bool) -> list[Bucket]:
        """Buckets to begin with now. With `only`, none but that one, and one at a time."""
        with self._driver.changed:
            while True:
                taken = [b for b in self._filled if only is None or (wait and b.index == only)]
                if taken or not wait:
                    break
                self._driver.check_alive(number)
                self._driver.changed.wait()
            for bucket in taken:
                self._filled.remove(bucket)
            return taken

    def _closing_operations(
        self, layout: Layout, number: int, counted: Sequence[int]
    ) -> list[Operation]:
        """What can only be exchanged once this worker's own tasks are complete, or dropped."""
        driver, step = self._driver, self._step
        mine = layout.hosted[layout.rank]
        if layout.rank in counted:
            with driver.changed:
                while not set(mine) <= step.done:
                    driver.check_alive(number)
                    driver.changed.wait()
            step.table.take(mine, step.own)
            used = step.gradients.used
        else:
            me = driver.status()
            step.table.drop(mine, (me.worker, me.incarnation))
            used = torch.zeros_like(step.table.used)
        table = TableGather(step.table, used, layout, step.prints)
        self.judge.prints, step.awaited = table.prints, table.awaited
        operations: list[Operation] = [table]
        if len(step.buffers):
            operations.append(BuffersSpread(step.buffers, layout, counted))
        return operations
