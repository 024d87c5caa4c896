"""Counts how often each worker was suspended: it is taken back later each time. Pure.

A worker that is late again as soon as it is back costs two changes of the view each time. The delay
counts steps of the job, so it fits jobs of all speeds, and ends before the worker has missed so
much that it could not catch up.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

DELAY_MAX = 32  # steps; fewer than a worker may miss (core/membership/formation.py)
ON_TIME = 128  # steps without being late, after which earlier times are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTimes:
    """Counts how often a worker was late, and records the last `step` in which it was."""

    count: int
    step: int

    @property
    def delay(self) -> int:
        """Return the number of steps for which it is held back; none the first time."""
        return min(1 << min(self.count - 1, 30), DELAY_MAX) if self.count > 1 else 0


class Suspensions:
    """Keeps the workers that were late not long ago, by name."""

    def __init__(self) -> None:
        self._times: dict[WorkerId, LateTimes] = {}

    def note_view(self, view: View) -> None:
        """Count the workers that a new view suspends, and forget those that are on time again."""
        for worker, times in list(self._times.items()):
            if view.resume_step > times.step + times.delay + ON_TIME:
                del self._times[worker]
        for lag in view.suspended:
            known = self._times.get(lag.worker)
            count = known.count + 1 if known is not None else 1
            self._times[lag.worker] = LateTimes(count=count, step=lag.committed)

    def held_back(self, view: View | None, step: int) -> frozenset[WorkerId]:
        """Return the suspended workers that are not taken back yet, in this step of the job."""
        found = []
        for lag in view.suspended if view is not None else ():
            times = self._times.get(lag.worker)
            if times is not None and step < times.step + times.delay:
                found.append(lag.worker)
        return frozenset(found)
