"""Brings the members of a view to the same state: from donors, checkpoints or missed steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.core.errors import Aborted, Damaged, UserError, WorldError
from holdfast.core.invalidations import Invalidations
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.core.types import View
from holdfast.store.storage import Missing
from holdfast.train.checkpoint.loaded_state import LoadedState
from holdfast.train.checkpoint.restorer import Restorer
from holdfast.train.checkpoint.saver import say
from holdfast.train.checkpoint.transfer import StateSync
from holdfast.train.driver import Driver
from holdfast.train.protection.recalling import Recalling
from holdfast.train.step.missed_steps import MissedSteps
from holdfast.train.step.reduction import Layout
from holdfast.train.transport.seam import Transport

BringingUpOrder = (
    ef.Restore | ef.RecallState | ef.RecallStep | ef.SendMissed | ef.ReceiveMissed | ef.SyncState
)
STORE_PAUSE_S = 1.0  # before a store that does not answer is asked again


class BringingUp:
    """Brings one worker up to date, or helps others; `restorer` is None without a store."""

    def __init__(
        self,
        driver: Driver,
        loaded: LoadedState,
        missed: MissedSteps,
        restorer: Restorer | None,
        recalling: Recalling,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = driver
        self._loaded = loaded
        self._missed = missed
        self._restorer = restorer
        self._recalling = recalling
        self._settled = settled  # waits until nothing else loads a state here

    def carry_out(
        self,
        order: BringingUpOrder,
        view: View,
        layout: Layout,
        transport: Transport,
    ) -> ev.WorkerEvent | None:
        """Do what a view needs before its steps; returns what came of it. Aborted."""
        donors = [view.rank(worker) for worker in view.donors]
        self._settled()
        match order:
            case ef.Restore(_, step):
                return self._restore(step, view, layout, transport)
            case ef.RecallState():
                return self._tell(view, self._recalling.state(view, self._loading))
            case ef.RecallStep(_, step):
                return self._tell(view, self._recalling.step(view, step))
            case ef.SendMissed(_, lag):
                steps = range(lag.committed, view.resume_step)
                first = layout.rank == donors[0]
                self._missed.send(transport, view.rank(lag.worker), steps, first=first)
                return None
            case ef.ReceiveMissed(_, step):
                self._missed.receive(transport, donors)
                return ev.MissedHeard(view.number, step)
            case ef.SyncState():
                return self._sync(view, layout, transport, donors)

    def keep(self, step: int, piece: Callable[[int], slice]) -> None:
        """Keep a reduced step for those who miss it; `piece`: what of a sum falls to this one."""
        self._missed.keep(step, piece)

    def forget(self) -> None:
        """Forget what was kept of earlier steps: nobody needs it any more."""
        self._missed.forget()

    def withdraw(self, invalidations: Invalidations) -> None:
        """Remove invalidated checkpoints from the store beside the work, whenever it answers."""
        restorer = self._restorer
        if restorer is None:
            return

        def withdraw() -> None:
            while True:
                try:
                    restorer.withdraw(invalidations)
                    break
                except WorldError as error:
                    say(f"what is invalidated cannot be removed just now: {error}")
                    time.sleep(STORE_PAUSE_S)

        threading.Thread(target=withdraw, name="holdfast-withdraw", daemon=True).start()

    def _sync(
        self, view: View, layout: Layout, transport: Transport, donors: list[int]
    ) -> ev.StatesCompared:
        back = [view.rank(lag.worker) for lag in view.catching_up]
        joiners = [view.rank(worker) for worker in view.joiners]
        sync = StateSync(transport, layout, self._loaded, self._loading)
        held = sync.run(donors, [rank for rank in joiners if rank not in back], back)
        prints = tuple((view.workers[rank], each) for rank, each in sorted(held.items()))
        return ev.StatesCompared(view.number, prints)

    def _restore(
        self, step: int, view: View, layout: Layout, transport: Transport
    ) -> ev.WorkerEvent:
        """Read the state from a checkpoint together with all members: nobody holds it any more."""
        restorer, number = self._restorer, view.number
        if restorer is None:
            raise UserError(f"the job is to begin at step {step}, and has no --store")
        try:
            try:
                restorer.restore(step, transport, layout, self._loading)
                return ev.Restored(number)
            except (Damaged, Missing) as error:
                text = f"the checkpoint of step {step} is not used: {error}"
                say(text)
                other = restorer.instead_of(step, view.invalidations)
                return ev.Unreadable(number, step, other, text)
        except Aborted:
            raise
        except WorldError as error:  # it may answer again: the next view tries
            text = f"the checkpoint of step {step} cannot be read just now: {error}"
            say(text)
            time.sleep(STORE_PAUSE_S)
            return ev.StoreSilent(number, text)

    def _tell(self, view: View, event: ev.WorkerEvent) -> ev.WorkerEvent:
        """Have the leader say what was recalled, once all of it is."""
        news = self._recalling.news
        if news and self._driver.status().worker == view.leader:
            self._driver.post(ev.EventNoted("memory", news))
        return event

    def _loading(self) -> None:
        self._driver.post(ev.Loading())
