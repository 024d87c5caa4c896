"""Adds workers' events to the job's event log, each once, though statuses repeat them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.membership.coordinator_events import Announce
from holdfast.core.types import Incarnation, JobEvent, Slot, WorkerId, WorkerStatus

OF_THE_JOB = ("wrong", "not_finite")  # kinds that are not about the worker that reports them


def _find_subject(event: JobEvent, reporter: WorkerId) -> WorkerId | None:
    """Return the worker that an event is about; None: no single one."""
    if event.about is None and event.kind not in OF_THE_JOB:
        return reporter
    return event.about


class EventLog:
    """Finds events that are new.

    `before`: processes that another coordinator has heard: their first words are known already.
    """

    def __init__(self, before: Iterable[Slot]) -> None:
        self._told: dict[WorkerId, tuple[Incarnation, int]] = {}
        self._before = {(slot.worker, slot.incarnation) for slot in before}

    def is_told(self, status: WorkerStatus) -> bool:
        """Return whether all events of a worker are marked as told."""
        if not status.events:
            return True
        return self._told.get(status.worker) == (status.incarnation, status.events[-1].number)

    def news(self, status: WorkerStatus) -> list[Announce]:
        """Return the events of a worker that have not been told yet."""
        worker, newest = status.worker, status.events[-1].number if status.events else 0
        incarnation, told = self._told.get(worker, (None, 0))
        if incarnation != status.incarnation:
            told = newest if (worker, status.incarnation) in self._before else 0
        new = (event for event in status.events if event.number > told)
        return [Announce(event.kind, event.text, _find_subject(event, worker)) for event in new]

    def mark(self, status: WorkerStatus) -> None:
        """Count the events of a worker as told."""
        self._told[status.worker] = status.incarnation, status.events[-1].number
