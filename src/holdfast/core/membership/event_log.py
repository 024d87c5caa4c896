"""Adds workers' events to the job's event log, each once, though statuses repeat them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.membership.coordinator_events import Announce
from holdfast.core.types import Incarnation, Slot, WorkerId, WorkerStatus


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
        return [Announce(event.kind, event.text, worker) for event in new]

    def mark(self, status: WorkerStatus) -> None:
        """Count the events of a worker as told."""
        self._told[status.worker] = status.incarnation, status.events[-1].number
