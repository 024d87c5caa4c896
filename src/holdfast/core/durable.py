"""From which step the job can start again when every worker is lost: what workers have saved."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.types import WorkerStatus


class Durable:
    """`step`: of the newest checkpoint, as far as one knows; 0 is the initial state.

    Only time depends on it, never the result: replaying from an older step gives the same bits.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._unreadable: tuple[int, ...] = ()

    def note(self, statuses: Iterable[WorkerStatus]) -> None:
        """A checkpoint that somebody could not read does not count any more."""
        steps = [self.step]
        for status in statuses:
            if status.unreadable and status.unreadable not in self._unreadable:
                self._unreadable = (*self._unreadable, status.unreadable)
            steps.append(status.saved)
        self.step = max((s for s in steps if s not in self._unreadable), default=0)
