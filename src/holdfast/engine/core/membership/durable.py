"""Knows from which checkpoint the job can start again when every worker is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast.engine.core.invalidations import (
    Invalidation,
    Invalidations,
    is_covered,
    is_invalidated,
    merge,
)
from holdfast.engine.core.types import Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus

KNOWN_MAX = 128  # the newest checkpoints are remembered


def speakers(statuses: Iterable[WorkerStatus]) -> Iterator[WorkerStatus]:
    """Select the statuses about checkpoints: in a large job few of very many."""
    return (s for s in statuses if s.saved or s.invalidations or s.unreadable)


class Durable:
    """Knows the `steps` of the checkpoints, the newest last.

    Only time depends on it, never the result: replaying from an older step gives the same bits.
    """

    def __init__(self, steps: Sequence[int] = (), invalidations: Invalidations = ()) -> None:
        self.steps = tuple(steps)
        self.invalidations = invalidations
        self._unreadable: tuple[int, ...] = ()
        self._judged = _accusations(invalidations)
        self._heard: dict[tuple[WorkerId, Incarnation], WorkerStatus] = {}

    @property
    def step(self) -> int:
        """Return the step to begin from; 0 is the initial state."""
        return self.steps[-1] if self.steps else 0

    def hear(self, statuses: Iterable[WorkerStatus]) -> None:
        """Keep statuses of workers until they are used: an agent may restart before that."""
        self._heard |= {(each.worker, each.incarnation): each for each in speakers(statuses)}

    def take_in(self, statuses: Iterable[WorkerStatus]) -> None:
        """Take in the statuses since the last time, and then these."""
        heard, self._heard = self._heard, {}
        self.note([*heard.values(), *speakers(statuses)])

    def note(self, statuses: Iterable[WorkerStatus]) -> None:
        """Take in statuses; an unreadable or invalidated checkpoint counts no more."""
        found, heard = list(self.steps), list(statuses)
        for status in heard:
            news = [
                invalidation.after
                for invalidation in status.invalidations
                if not is_covered(invalidation, self.invalidations)
            ]
            found = [step for step in found if step <= min(news, default=step)]
            self.invalidations = merge(self.invalidations, status.invalidations)
            if status.unreadable and status.unreadable not in self._unreadable:
                self._unreadable = (*self._unreadable, status.unreadable)
        found += [status.saved for status in heard if status.saved and self._counts(status)]
        readable = {step for step in found if step not in self._unreadable}
        self.steps = tuple(sorted(readable))[-KNOWN_MAX:]

    @property
    def accused(self) -> list[WorkerId]:
        """Return the workers that compute wrongly and have not been judged yet."""
        news = _accusations(self.invalidations) - self._judged
        return sorted({worker for worker, _ in news})

    def judge(self) -> None:
        """Count the workers that are accused by now as judged."""
        self._judged |= _accusations(self.invalidations)

    def _counts(self, status: WorkerStatus) -> bool:
        """Return whether a worker's word counts: it knows of the invalidations so far."""
        unknown = tuple(
            invalidation
            for invalidation in self.invalidations
            if not is_covered(invalidation, status.invalidations)
        )
        return not is_invalidated(unknown, status.saved, status.view)


def _accusations(invalidations: Iterable[Invalidation]) -> set[tuple[WorkerId, ViewNumber]]:
    return {(worker, each.view) for each in invalidations for worker in each.wrong}
