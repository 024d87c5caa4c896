"""The engine thread: builds each view's group, syncs joiners, reduces and votes, step after step.

It never decides anything about membership: when an exchange fails it says so and waits for the next
view. Partial sums live in the buckets, so a new view simply reduces them again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from holdfast.core import worker as machine
from holdfast.core.audit import Audit
from holdfast.core.balance import BalancePolicy
from holdfast.core.errors import Damaged, Severed, UserError, WorldError
from holdfast.core.speeds import Speeds
from holdfast.core.types import Laggard, View, WorkerId
from holdfast.store.storage import Missing
from holdfast.train.auditing import Court, StepAudits
from holdfast.train.buckets import Bucket, Gradients
from holdfast.train.clock import TaskClock
from holdfast.train.driver import Driver, Link, ViewRendezvous
from holdfast.train.exchange import (
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
from holdfast.train.missed import MissedSteps
from holdfast.train.record import Buffers, StepTable
from holdfast.train.restoring import Restorer
from holdfast.train.saver import Saver, say
from holdfast.train.transfer import StateSync
from holdfast.train.transport import AloneTransport, Rendezvous, Transport

STORE_PAUSE_S = 1.0  # before another view tries a store that does not answer


class StepState:
    """What the script's thread and the engine share of a step, under the driver's lock."""

    def __init__(
        self, gradients: Gradients, table: StepTable, buffers: Buffers, clock: TaskClock
    ) -> None:
        self.clock = clock
        self.audits = StepAudits()
        self.gradients = gradients
        self.table = table
        self.buffers = buffers
        self.index: int | None = None  # the open step
        self.reduced_in = 0  # the view in which its gradient became complete
        self.done: set[int] = set()  # virtual ranks whose tasks are complete here

    def open(self, index: int) -> None:
        self.index = index
        self.done.clear()
        self.clock.reset()
        self.table.used.zero_()


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
        self.audits: Callable[[View, int], tuple[Audit, ...]] = lambda view, step: ()
        self._restorer = restorer
        self._saver = saver
        self._driver = driver
        self._link = link
        self._step = step
        self._protected = protected
        self._make_transport = make_transport
        self._filled: deque[Bucket] = deque()
        self._missed = MissedSteps(step)
        self._mistakes = 0  # of this worker
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
            except Severed as error:
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
        driver.adopt_group(number, transport)
        if self._saver is not None:
            self._saver.enter(view)
        self._open(view, layout, transport)
        if view.joiners:
            ranks = {w: r for r, w in enumerate(view.workers)}
            if not view.donors and view.resume_step:
                self._restore(view, layout, transport)
            for lag in view.behind:
                self._catch_up(view, lag, transport, [ranks[w] for w in view.donors])
            sync = StateSync(
                transport, layout, self._protected, lambda: driver.post(machine.Loading())
            )
            loading = [ranks[w] for w in view.joiners if view.lag(w) is None]
            sync.run([ranks[w] for w in view.donors], loading)
        self._missed.forget()
        self._agree_on_audits(layout, transport)
        driver.post(machine.Synced(number))
        speeds = Speeds(view, BalancePolicy() if self.rebalance else None)
        court = Court()
        while True:
            step, layout = self._await_open_step(view)
            self._reduce(layout, transport, number)
            if not self._audited(court, view, layout, transport):
                continue  # the step is computed again
            court = Court()
            self._step.reduced_in = number
            driver.post(machine.Reduced(number, step))
            votes = vote(transport, layout, number, step, self._opinion(step))
            if any(v.save for v in votes) and not any(v.busy for v in votes):
                driver.save_after(step, view)
            if view.aside:
                self._missed.keep(step, layout, number)
            for kind, text in speeds.observe([v.compute_us for v in votes], driver.leads):
                driver.post(machine.Remarked(kind, text))
            self._step.audits.given_up = any(v.unlike for v in votes)
            pending = any(v.pending for v in votes)
            driver.post(machine.Voted(number, step, pending, speeds.owners))

    def _audited(self, court: Court, view: View, layout: Layout, transport: Transport) -> bool:
        """Whether the sums may be used: what was computed twice came to the same bits.

        Else the step begins anew. Severed when a member is wrong again: it leaves the job.
        """
        audits, driver = self._step.audits, self._driver
        if not audits.audits:
            return True
        self._await(view, lambda: not audits.owed(view.number))
        court.hear(audits.compare(transport, layout, view))
        if not court.differing and not audits.attempt:
            return True
        if court.hopeless:
            audits.given_up = True
            self._tell(
                "the same task comes to other bits each time: nothing is audited any more; use "
                "deterministic algorithms (torch.use_deterministic_algorithms)"
            )
            return True
        if court.agreed(driver.owners):
            self._blame(court.wrong(), leaves=False)
            return True
        wrong = court.wrong()
        if audits.attempt and wrong:
            self._blame(wrong, leaves=True)
            # Whoever is to leave must have heard of it: its end breaks the group.
            all_gather(transport, layout, torch.zeros(1, dtype=torch.int64), TAG_AUDIT)
            raise Severed(f"worker {wrong[0][0]} computes wrongly")
        with driver.changed:
            step = self._step
            step.gradients.begin_step()
            step.open(driver.committed)
            audits.open(
                view.number,
                driver.worker,
                court.again(audits.audits, view.workers),
                audits.attempt + 1,
            )
            driver.changed.notify_all()
        return False

    def _agree_on_audits(self, layout: Layout, transport: Transport) -> None:
        """A joiner does not know, nor who has missed a vote, whether they have been given up."""
        unlike = torch.tensor([self._step.audits.given_up], dtype=torch.int64)
        said = all_gather(transport, layout, unlike, TAG_AUDIT)
        self._step.audits.given_up = bool(said.any())

    def _blame(self, wrong: list[tuple[WorkerId, int]], *, leaves: bool) -> None:
        """Who has computed wrongly leaves the job, if at once or for the second time."""
        for worker, vrank in wrong:
            self._tell(
                f"worker {worker} has computed virtual rank {vrank} of step "
                f"{self._driver.committed} wrongly; the step was computed again"
            )
        mine = any(worker == self._driver.worker for worker, _ in wrong)
        self._mistakes += mine
        if mine and (leaves or self._mistakes > 1):
            say("this worker computes wrongly: it leaves the job")
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, text: str) -> None:
        if self._driver.leads:
            self._driver.post(machine.Remarked("wrong", text))

    def _opinion(self, step: int) -> Vote:
        driver, saver = self._driver, self._saver
        due = busy = False
        if saver is not None:
            due, busy = saver.due(step + 1) and driver.leads, saver.busy
        save = due or (saver is not None and driver.save_wanted)
        unlike = self._step.audits.given_up
        return Vote(driver.pending, save, busy, unlike, self._step.clock.step_us())

    def _catch_up(self, view: View, lag: Laggard, transport: Transport, donors: list[int]) -> None:
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
        """Wait for the script. Severed when the view is given up."""
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
                driver.post(machine.Remarked("rot", text))
                driver.post(machine.Unreadable(view.number, step, restorer.other_than(step)))
                raise Severed(str(error)) from None
        except Severed:
            raise
        except WorldError as error:  # it may answer again: the next view tries
            say(f"the checkpoint of step {step} cannot be read just now: {error}")
            time.sleep(STORE_PAUSE_S)
            raise Severed(str(error)) from None

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
                self._step.audits.plan(number, driver.worker, self.audits(view, step))
                driver.changed.notify_all()
            self._filled = deque(b for b in buckets if hosted <= b.contributed)
            owners = driver.owners
        if self._layout[0] != (number, owners):
            self._layout = (number, owners), Layout.of(view, driver.worker, owners)
        return step, self._layout[1]

    def _on_filled(self, bucket: Bucket) -> None:
        if set(self._driver.hosted()) <= bucket.contributed:
            self._filled.append(bucket)
            self._driver.changed.notify_all()

    def _reduce(self, layout: Layout, transport: Transport, number: int) -> None:
        """All operations of the step; those that are ready overlap with the script's backward."""
        begun, total = 0, len(self._step.gradients.buckets)
        gathering: deque[Operation] = deque()
        spreading: list[Operation] = []
        closing: list[Operation] = []
        while begun < total or gathering:
            only = begun if transport.ordered else None
            for bucket in self._take_filled(number, only, wait=not gathering):
                begun += 1
                with self._driver.changed:  # a newer view may merge the partial sums further
                    self._driver.check_alive(number)
                    started = BucketSum(bucket, layout)
                started.gather(transport)
                gathering.append(started)
            if begun == total and not closing:  # under way beside the last buckets
                closing = self._closing_operations(layout, number)
                for operation in closing:
                    operation.gather(transport)
            if gathering:
                gathered = gathering.popleft()
                gathered.spread(transport)
                spreading.append(gathered)
        for operation in closing:
            operation.spread(transport)
        for operation in (*spreading, *closing):
            operation.finish()

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

    def _closing_operations(self, layout: Layout, number: int) -> list[Operation]:
        """What can only be exchanged once this worker's own tasks are complete."""
        driver, step = self._driver, self._step
        mine = set(layout.hosted[layout.rank])
        with driver.changed:
            while not mine <= step.done:
                driver.check_alive(number)
                driver.changed.wait()
        operations: list[Operation] = [TableGather(step.table, step.gradients.used, layout)]
        if len(step.buffers):
            operations.append(BuffersSpread(step.buffers, layout))
        return operations
