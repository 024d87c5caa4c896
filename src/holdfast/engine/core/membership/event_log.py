"""Adds workers' events to the job's event log, each once, though statuses repeat them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.core.job_record import Slot
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.types import Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import JobEvent, WorkerStatus

ROOM = "room"  # kind of events on the run directory's file system, from each worker that uses it
# Kinds that are not about the worker that reports them.
OF_THE_JOB = ("wrong", "not_finite", ROOM)
Rotten = tuple[ViewNumber, str]  # a view, and the checkpoint that its members cannot read


def _find_subject(event: JobEvent, reporter: WorkerId) -> WorkerId | None:
    """Return the worker that an event is about; None: no single one."""
    if event.about is None and event.kind not in OF_THE_JOB:
        return reporter
    return event.about


class EventLog:
    """Finds events that are new.

    Every member of a view may find the same damaged checkpoint, or the same disk full: only the
    first event on it is new.

    `before`: processes that another coordinator has heard: their first words are known already.
    """

    def __init__(self, before: Iterable[Slot]) -> None:
        self._told: dict[WorkerId, tuple[Incarnation, int]] = {}
        self._before = {(slot.worker, slot.incarnation) for slot in before}
        self._rotten: dict[Rotten, bool] = {}
        self._room = ""  # the last event on the room that workers have

    def is_told(self, status: WorkerStatus) -> bool:
        """Return whether all events of a worker are marked as told."""
        if not status.events:
            return True
        return self._told.get(status.worker) == (status.incarnation, status.events[-1].number)

    def news(self, statuses: Iterable[WorkerStatus]) -> list[Announce]:
        """Return the events of workers that have not been told yet."""
        found, rotten, room = list[Announce](), dict(self._rotten), self._room
        for status in statuses:
            for event in self._find_new(status):
                checkpoint = _find_rotten(status, event)
                is_known = event.kind == ROOM and event.text == room
                room = event.text if event.kind == ROOM else room
                if checkpoint not in rotten and not is_known:
                    about = _find_subject(event, status.worker)
                    found.append(Announce(event.kind, event.text, about))
                if checkpoint is not None:
                    rotten[checkpoint] = True
        return found

    def mark(self, status: WorkerStatus) -> None:
        """Count the events of a worker as told."""
        new = self._find_new(status)
        found = (_find_rotten(status, event) for event in new)
        self._rotten.update({each: True for each in found if each is not None})
        self._room = next((e.text for e in reversed(new) if e.kind == ROOM), self._room)
        self._told[status.worker] = status.incarnation, status.events[-1].number

    def _find_new(self, status: WorkerStatus) -> list[JobEvent]:
        worker, newest = status.worker, status.events[-1].number if status.events else 0
        incarnation, told = self._told.get(worker, (None, 0))
        if incarnation != status.incarnation:
            told = newest if (worker, status.incarnation) in self._before else 0
        return [event for event in status.events if event.number > told]


def _find_rotten(status: WorkerStatus, event: JobEvent) -> Rotten | None:
    """Return the checkpoint that an event calls damaged, with the view that found it."""
    return (status.view, event.text.partition(": ")[0]) if event.kind == "rot" else None
