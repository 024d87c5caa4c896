"""Adds workers' events to the job's event log, each once, though statuses repeat them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.core.types import Incarnation, Slot, WorkerId, WorkerStatus


class EventLog:
    """Finds events that are new.

    `before`: processes that another coordinator has heard: what they say first has been told.
    """

    def __init__(self, before: Iterable[Slot]) -> None:
        self._told: dict[WorkerId, tuple[Incarnation, int]] = {}
        self._before = {(slot.worker, slot.incarnation) for slot in before}

    def news(self, statuses: Iterable[WorkerStatus]) -> Iterator[tuple[str, str, WorkerId]]:
        """Yield kind, text and worker of each event that has not been told yet."""
        for status in statuses:
            if not status.events:
                continue
            worker, newest = status.worker, status.events[-1].number
            incarnation, told = self._told.get(worker, (None, 0))
            if incarnation != status.incarnation:
                told = newest if (worker, status.incarnation) in self._before else 0
            for event in status.events:
                if event.number > told:
                    yield event.kind, event.text, worker
            self._told[worker] = status.incarnation, newest
