"""Checks that workers are held back as spares only while as many as should compute do."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.lab.sim.run_options import Options
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
        # A fed worker takes the place of one that is about to leave, in a later view.
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
        """Return whether more should be members of a view, of those that `nodes` nodes run."""
        if not self._kept:
            return len(view.members) < self._most
        return self._hot or len(view.members) < min(self._most, self._per_node * nodes)

    def check_hosts(self, view: View, step: int, owners: Collection[WorkerId]) -> None:
        """Check who computes a step."""
        working = sorted(frozenset(owners) & frozenset(view.spares))
        if working:
            raise Violation(f"spares {working} of view {view.number} compute step {step}")
