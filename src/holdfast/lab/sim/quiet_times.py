"""Checks that a job makes progress, and its views settle, soon after the last fault that struck it.

A worker is held back as a spare only while all places for computing workers are taken. Otherwise
each worker that is ready must soon be a member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.wrong_bits import Violation


class SpareRules:
    """Observes the views of one run; raises Violation when spares have work, or are not used."""

    def __init__(self, options: Options) -> None:
        self._per_node = options.slots - options.spares
        self._most = options.vranks
        if options.spares:
            self._most = min(options.vranks, self._per_node * options.agents)
        self._kept = bool(options.spares)
        self._hot = options.hot_spares
        self._last: View | None = None

    def check_view(self, view: View) -> None:
        """Check a view that the coordinator has formed."""
        last, self._last = self._last, view
        # A fed worker takes the place of a leaving one, in a later view.
        cold = (
            {*view.spares} - {each.worker for each in view.fed} - {*(last.spares if last else ())}
        )
        if not self._kept and cold:
            raise Violation(f"view {view.number} has spares, and none are to be held back")
        if cold and not self._hot:
            raise Violation(f"view {view.number} has spares {sorted(cold)}: they should be warm")
        if frozenset(view.owners) & frozenset(view.spares):
            raise Violation(f"view {view.number}: a spare hosts tasks")
        computing = len(view.members) - len(view.spares)
        if self._kept and computing > self._most:
            raise Violation(f"{computing} workers compute in view {view.number}, and spares should")
        if view.spares and view.donors and last is not None and last.number != view.number:
            before = len(last.members) - len(last.spares)
            if computing < before:
                raise Violation(f"view {view.number} has lost workers, and its spares are not used")

    def room_for(self, view: View, nodes: int) -> bool:
        """Return whether more of the workers that `nodes` nodes run should be members of a view."""
        if not self._kept:
            return len(view.members) < self._most
        return self._hot or len(view.members) < min(self._most, self._per_node * nodes)

    def check_hosts(self, view: View, step: int, owners: Collection[WorkerId]) -> None:
        """Check who computes a step."""
        working = sorted(frozenset(owners) & frozenset(view.spares))
        if working:
            raise Violation(f"spares {working} of view {view.number} compute step {step}")


class QuietTimes:
    """Observes one run while no fault disturbs it; raises Violation when too little happens."""

    def __init__(self, options: Options) -> None:
        self._recovery_s = options.recovery_s
        self.spare_rules = SpareRules(options)
        self._joining_s = options.joining_s + options.feeding_s
        # Views may change without a fault.
        self._looks_late = options.speculation > 0
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
        """Check that no worker waits for long to join, after it has been away."""
        before, self._idle = self._idle, {}
        if not self.spare_rules.room_for(view, len({process.agent for process in ordered})):
            return
        apart = [*view.workers, *(lag.worker for lag in view.suspended)]
        for process in ordered:
            ready = process.machine.snapshot().stage is Stage.READY
            if not ready or process.worker in apart:
                continue
            since = self._idle[process.key] = before.get(process.key, now)
            if now > since + self._joining_s:
                raise Violation(f"worker {process.key} is idle, and there is room for it")
