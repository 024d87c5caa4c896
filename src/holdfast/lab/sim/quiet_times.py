"""Checks that a job comes further, and to rest, soon after the last fault that struck it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.spare_rules import SpareRules
from holdfast.lab.sim.wrong_bits import Violation


class QuietTimes:
    """Observes one run while nothing disturbs it; raises Violation when too little happens."""

    def __init__(self, options: Options, spares: SpareRules) -> None:
        self._recovery_s = options.recovery_s
        self._spares = spares
        self._joining_s = options.joining_s + options.feeding_s
        self._looks_late = options.speculation > 0  # views may change although nothing fails
        self._views_max = 2 * options.agents * options.slots + 2
        self.moved_at = 0.0  # when the last step was committed
        self._views = 0  # formed since the job must have recovered
        self._newest = 0
        self._idle: dict[Key, float] = {}  # since when

    def record_commit(self, now: float) -> None:
        """Record that a step is committed."""
        self.moved_at = now

    def look(
        self, now: float, disturbed_until: float, view: View | None, ordered: Iterable[Actor]
    ) -> None:
        """Check a job that is not over; `ordered`: its processes, but for those to be ended."""
        since = max(self.moved_at, disturbed_until)
        if now > since + self._recovery_s:
            raise Violation(f"no step is committed for {now - since:.0f} s, and nothing is wrong")
        if view is None or now < disturbed_until + self._recovery_s:
            self._newest = view.number if view is not None else 0
            return
        self._views += view.number != self._newest
        self._newest = view.number
        if self._views > self._views_max and not self._looks_late:
            raise Violation(f"{self._views} views follow each other, and nothing is wrong")
        self._check_idle(now, view, list(ordered))

    def _check_idle(self, now: float, view: View, ordered: Sequence[Actor]) -> None:
        """Check that nobody waits for long to join; a worker may have been away until just now."""
        before, self._idle = self._idle, {}
        if not self._spares.room_for(view, len({process.agent for process in ordered})):
            return
        apart = [*view.workers, *(lag.worker for lag in view.suspended)]
        for process in ordered:
            ready = process.machine.snapshot().stage is Stage.READY
            if not ready or process.worker in apart:
                continue
            since = self._idle[process.key] = before.get(process.key, now)
            if now > since + self._joining_s:
                raise Violation(f"worker {process.key} is idle, and there is room for it")
