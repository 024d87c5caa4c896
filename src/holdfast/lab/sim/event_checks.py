"""Checks that the event log tells each incident as one chain: fault, view, first step afterwards.

It compares the lines with the views that the journal holds, and with the workers in them.
"""

from __future__ import annotations

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.event_chain import FAULTS, RESUMED
from holdfast.engine.core.views import View
from holdfast.lab.sim.wrong_bits import Violation

ROOTS = (*FAULTS, "drain", "silent")


class EventChecks:
    """Observes the lines of all coordinators; raises Violation when a chain is broken."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}  # by id
        self._causes: dict[str, tuple[str, ...]] = {}
        self._view: View | None = None  # the newest one in a line of the present coordinator
        self._owed: dict[str, int] = {}  # views after a fault, without their end: their numbers

    def record_coordinator_start(self, view: View | None) -> None:
        """Record that a coordinator starts: it knows nothing of incidents before it."""
        self._view = view
        self._owed.clear()

    def check_line(self, line: Announce, view: View | None) -> None:
        """Check a line. `view`: the newest in the journal."""
        if not line.id or line.id in self._kinds:
            raise Violation(f"the event {line.text!r} has the id {line.id!r}, which is not new")
        for cause in line.causes:
            if cause not in self._kinds:
                raise Violation(f"event {line.id} has the cause {cause}, which was not told")
        self._kinds[line.id], self._causes[line.id] = line.kind, line.causes
        if line.kind == "view" and view is not None:
            self._check_view_line(line, view)
        elif line.kind == RESUMED:
            for cause in line.causes:
                self._owed.pop(cause, None)
            if line.cost is None or not self._has_root(line):
                raise Violation(f"event {line.id} ends an incident without a fault or a cost")

    def _check_view_line(self, line: Announce, view: View) -> None:
        before, self._view = self._view, view
        gone = set(before.workers) - set(view.workers) if before is not None else set()
        if not gone:
            return
        if not self._has_root(line):
            raise Violation(f"view {view.number} leaves out {sorted(gone)}, and no fault is told")
        self._owed = {line.id: view.number}  # a later view continues the incident

    def _has_root(self, line: Announce) -> bool:
        found, seen = list(line.causes), set(line.causes)
        while found:
            each = found.pop()
            if self._kinds[each] in ROOTS:
                return True
            new = [cause for cause in self._causes[each] if cause not in seen]
            seen.update(new)
            found += new
        return False

    def check_report(self, report: AgentReport) -> None:
        """Check, after the coordinator took in a report of a commit, that the incident is ended."""
        view = self._view
        if view is None or view.number not in self._owed.values():
            return
        for status in report.workers:
            member = view.includes(status.worker, status.incarnation)
            if member and status.view == view.number and status.committed > view.resume_step:
                raise Violation(f"view {view.number} has committed a step: no event ends its fault")
