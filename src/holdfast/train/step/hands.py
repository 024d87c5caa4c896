"""Carries out at once what the step machine decides about gradients and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import Aborted
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.core.types import ViewNumber
from holdfast.train.feeding.fed_receiver import FedReceiver
from holdfast.train.feeding.feeder import Feeder
from holdfast.train.ledger_recorder import LedgerRecorder
from holdfast.train.protection.protector import Protector
from holdfast.train.step.bringing_up import BringingUp
from holdfast.train.step.engine import Engine
from holdfast.train.step.step_data import StepData


class StepHands:
    """Carries effects out in whichever thread has posted the event, with the monitor held."""

    def __init__(
        self,
        data: StepData,
        engine: Engine,
        bringing_up: BringingUp,
        recorder: LedgerRecorder,
        feeder: Feeder,
        receiver: FedReceiver,
        protector: Protector | None,
    ) -> None:
        self._data = data
        self._engine = engine
        self._bringing_up = bringing_up
        self._recorder = recorder
        self._feeder = feeder
        self._receiver = receiver
        self._protector = protector

    def carry_out(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        """Do it; returns what the machine is to be told of it."""
        match effect:
            case ef.Redo():
                self._data.gradients.clear()
                self._data.reset()
            case ef.KeepStep(step):
                self._bringing_up.keep(step, self._engine.piece)
            case ef.PutRight(_, digests):
                try:
                    self._engine.put_right(digests)
                except Aborted as error:
                    return [ev.GroupBroken(ViewNumber(self._data.reduced_in), str(error))]
            case ef.MarkCommitted(view, step) if self._protector is not None:
                self._protector.mark(view, step)
            case ef.ForgetProtected(view, step) if self._protector is not None:
                self._protector.forget(view, step)
            case ef.NoteDoubt(step, view, again):
                self._recorder.doubt(step, view, again)
            case ef.Withdraw(invalidations):
                self._bringing_up.withdraw(invalidations)
            case ef.LookWhoIsLate(view, step):
                return [ev.StillAwaited(view, step, tuple(self._engine.awaited()))]
            case ef.FeedStep(step, compared):
                self._feeder.send_step(step, self._engine.piece, compared=compared)
            case ef.EndFeeding(finish):
                self._feeder.end(finish=finish)
            case ef.Follow(order):
                return self._receiver.follow(order)
            case ef.LoadFed(number):
                self._receiver.load(number)
            case ef.TakeFed(step):
                return self._receiver.take(step)
            case ef.Unfollow():
                self._receiver.unfollow()
        return []
