"""Carries out at once what the machines of a worker decide, in the thread that posted the event."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.train.protection.protector import Protector
from holdfast.engine.train.script.ledger_recorder import LedgerRecorder
from holdfast.engine.train.state.state_sources import StoreSource
from holdfast.engine.train.step.engine import Engine
from holdfast.engine.train.step.mover import StateMover
from holdfast.engine.train.step.step_data import StepData


class StepHands:
    """Carries effects out with the monitor held."""

    def __init__(
        self,
        data: StepData,
        engine: Engine,
        mover: StateMover,
        store: StoreSource,
        recorder: LedgerRecorder,
        protector: Protector | None,
    ) -> None:
        self._data = data
        self._engine = engine
        self._mover = mover
        self._store = store
        self._recorder = recorder
        self._protector = protector

    def carry_out(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        """Carry out one effect, and return the events that follow for the machine."""
        match effect:
            case ef.Redo():
                self._data.gradients.clear()
                self._data.reset()
            case ef.PutRight(_, digests):
                try:
                    self._engine.put_right(digests)
                except Aborted as error:
                    return [ev.GroupBroken(ViewNumber(self._data.reduced_in), str(error))]
            case ef.MarkCommitted(view, step) if self._protector is not None:
                self._protector.mark(view, step)
            case ef.NoteDoubt(step, view, again):
                self._recorder.doubt(step, view, again)
            case ef.Withdraw(invalidations):
                self._store.withdraw(invalidations)
            case ef.LookWhoIsLate(_, step):
                self._engine.look_who_is_late(step)
            case _ if isinstance(effect, ef.ReplicaEffect):
                return self._mover.carry_out_at_once(effect, self._engine.connections)
        return []
