"""Keeps the status of one worker, for the three machines that decide for it. Pure.

Membership, replica and step share it. They put each decision here at once: a change of the status,
an effect, an event for the job's log. So effects leave in the order of decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from holdfast.engine.core.ground.effects import Outcome, Tell, WorkerEffect
from holdfast.engine.core.ground.events import EventNoted
from holdfast.engine.core.types import NO_VIEW, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import JobEvent, Phase, WorkerStatus

JOB_EVENTS_MAX = 8  # events that a status carries
FOREVER = float("inf")


class Standing:
    """Keeps a worker's status and newest view, and collects the effects of one event."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self.me = worker
        self.status = WorkerStatus(worker=worker, incarnation=incarnation)
        self.view: View | None = None  # the newest view installed
        self.pending_view = NO_VIEW  # the newest view that is known to be left soon
        self.pending_save = False  # it ends at a boundary that is saved
        self.acting_until = FOREVER  # the end of the right to act, by this node's clock
        self.is_exact = False  # on a sound machine a task of the script has the same bits each time
        self.now = 0.0
        self._effects: list[WorkerEffect] = []

    # ------------------------------------------------------------ decisions

    def change(self, **fields: object) -> None:
        """Change fields of the status."""
        seq = self.status.seq + 1
        self.status = dataclasses.replace(self.status, seq=seq, **fields)  # type: ignore[arg-type]

    def record_reduced(self, reduced: bool) -> None:
        """Record whether the complete gradient of the step is here and may be used."""
        if reduced != self.status.reduced:
            self.change(reduced=reduced)

    def order(self, *effects: WorkerEffect) -> None:
        """Order these effects of the driver, after the earlier ones."""
        self._effects.extend(effects)

    def tell(self) -> None:
        """Send the status as it is now to the agent."""
        self._effects.append(Tell(self.status))

    def note(self, kind: str, text: str, about: WorkerId | None = None) -> None:
        """Add an event to the job's log. `about`: the worker that it is about, if another one."""
        events = self.status.events
        number = events[-1].number + 1 if events else 1
        event = JobEvent(number=number, kind=kind, text=text, about=about)
        self.change(events=(*events, event)[-JOB_EVENTS_MAX:])
        self.tell()

    def carry(self, outcomes: Iterable[Outcome]) -> None:
        """Order these effects and note these events, in their order."""
        for outcome in outcomes:
            if isinstance(outcome, EventNoted):
                self.note(outcome.kind, outcome.text, outcome.about)
            else:
                self._effects.append(outcome)

    def take_effects(self) -> list[WorkerEffect]:
        """Return the effects that were ordered since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------ what follows from it

    @property
    def acts(self) -> bool:
        """Return whether this worker may act in its newest view."""
        return self.status.view > self.status.promised

    def acts_in(self, number: ViewNumber) -> bool:
        """Return whether this worker may act in the view with this number."""
        return self.status.view == number > self.status.promised

    def leads(self, now: float) -> bool:
        """Return whether this worker acts for the job."""
        view = self.view
        return (
            view is not None
            and view.leader == self.me
            and view.number > self.status.promised
            and now < self.acting_until
        )

    @property
    def leads_now(self) -> bool:
        """Return whether it leads at the time of the event that is being handled."""
        return self.leads(self.now)

    @property
    def is_change_pending(self) -> bool:
        """Return whether it knows of a planned change of the view, as its votes announce."""
        return self.view is not None and self.pending_view >= self.view.number

    @property
    def ends_saved(self) -> bool:
        """Return whether its votes ask that the last state of its view be saved."""
        return self.is_change_pending and self.pending_save

    @property
    def rests(self) -> bool:
        """Return whether the script has applied every committed step, and waits."""
        return self.status.phase is Phase.BOUNDARY or self.status.has_left_loop
