"""Checks the promises to people: the number of nodes that take part, the leader, the records.

Each check compares an order of the coordinator, or an act of a process, with facts of the simulated
world and with the reports that reached the coordinator, never with the beliefs of a machine. In the
event log each incident must be one chain: fault, view, first step afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.durable import KNOWN_MAX
from holdfast.engine.core.membership.event_log import FAULTS, RESUMED
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.views import View
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.wrong_bits import Violation

ROOTS = (*FAULTS, "drain", "silent")


class Promises:
    """Observes one run; raises Violation when a promise is broken."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.events = EventChecks()
        self._fence_s = options.lease_s + options.lease_margin_s
        self._started_at = 0.0  # the present coordinator
        self._heard: dict[AgentId, tuple[float, AgentReport]] = {}  # by it: the newest of each
        self._heard_by_any: dict[AgentId, float] = {}  # coordinator, at last
        # Nodes that were drained while they had slots: another may have taken their place.
        self._drained: dict[AgentId, bool] = {}
        self._refused: dict[int, bool] = {}  # steps of checkpoints that it knows to be damaged
        self._given_up: dict[tuple[int, int], bool] = {}  # processes that were silent for so long
        # Number of loops that some script has left.
        self._loops_left = 0
        self._votes: dict[int, int] = {}  # by view: the newest step committed by votes
        self.unreadable: dict[int, bool] = {}  # steps whose checkpoint was damaged or removed

    # ------------------------------------------------------------ what the coordinator knows

    def record_coordinator_start(self, now: float) -> None:
        """Record that a coordinator starts, without any report yet."""
        self._started_at = now
        self._heard.clear()
        self._refused.clear()

    def record_report(self, report: AgentReport, now: float) -> None:
        """Record that the coordinator takes in a report."""
        _, newest = self._heard.get(report.agent, (now, None))
        if newest is None or (report.incarnation, report.seq) > (newest.incarnation, newest.seq):
            self._heard[report.agent] = now, report
            self._heard_by_any[report.agent] = now
            if report.draining:
                self._drained[report.agent] = True
            for status in report.workers:
                self._refused[status.unreadable] = True

    def _heard_at(self, agent: AgentId) -> float:
        return self._heard[agent][0] if agent in self._heard else self._started_at

    # ------------------------------------------------------------ what is promised

    def check_orders(self, record: JobRecord, now: float) -> None:
        """Check what the journal orders."""
        for slot in record.slots:
            if now - self._heard_at(slot.agent) >= self._options.abandon_s:
                self._given_up[slot.worker, slot.incarnation - 1] = True
        nodes = sorted({slot.agent for slot in record.slots})
        # Then slots are only the places where a process may still run.
        ends = record.outcome is not None
        self._drained = {name: True for name in self._drained if name in nodes}
        staying = [name for name in nodes if name not in self._drained]
        if len(staying) > self._options.nodes_max and not ends:
            raise Violation(f"{nodes} have slots: {self._options.nodes_max} nodes may take part")

    def check_start(self, process: Actor, live: Iterable[Actor]) -> None:
        """Check that a node runs no more processes than it has slots."""
        here = [other.key for other in live if other.agent == process.agent]
        if len(here) >= self._options.slots:
            raise Violation(f"{process.agent} has {self._options.slots} slots, {here} live there")

    def check_remembered(self, before: JobRecord, record: JobRecord) -> None:
        """Check that no checkpoint that the journal knows is forgotten, or passed over."""
        known = [
            step
            for step in before.saved
            if step
            and not self.unreadable.get(step)
            and all(step <= each.after for each in record.invalidations)
        ]
        if not set(known[-KNOWN_MAX // 2 :]) <= set(record.saved):
            raise Violation(f"of the checkpoints {known} the journal keeps {record.saved}")
        view = record.view
        if view is not None and view != before.view and not view.donors:
            if view.resume_step < max(known, default=0):
                raise Violation(f"view {view.number} begins from {view.resume_step} of {known}")

    def check_view(self, before: View | None, view: View, now: float) -> None:
        """Check the members of a new view, and its leader."""
        nodes = len(self._heard)
        if before is None and nodes < self._options.nodes_min:
            raise Violation(f"the job starts on {nodes} of {self._options.nodes_min} nodes")
        checkpoint = _checkpoint_of(view)
        if checkpoint and checkpoint in self._refused:
            raise Violation(f"view {view.number} begins from what was found to be damaged")
        leader = before.member(before.leader) if before is not None else None
        if leader is not None and leader in view.members and leader.worker not in view.joiners:
            if view.leader != leader.worker:
                raise Violation(f"view {view.number} takes the lead from worker {leader.worker}")
        there = [r for name, (_, r) in self._heard.items() if not self.is_given_up(name, now)]
        begins_on_drained = not view.donors and all(report.draining for report in there)
        for worker in view.joiners if not begins_on_drained else ():
            member = view.member(worker)
            assert member is not None
            newest = self._heard.get(member.agent)
            if newest is not None and newest[1].draining and not newest[1].failing:
                raise Violation(f"worker {worker} joins on {member.agent}, which is drained")

    def check_given_up(self, view: View, holder: Actor, now: float) -> None:
        """Check that a silent process which holds the state is given up as late as is promised.

        It may be sooner if the nodes' memory brings the job as far as it was known to be.
        """
        _, report = self._heard.get(holder.agent, (0.0, None))
        known = (
            [s for s in report.workers if (s.worker, s.incarnation) == holder.key] if report else []
        )
        protected = self._options.redundancy.data > 0
        if protected and all(status.committed <= view.resume_step for status in known):
            return
        if not self.is_given_up(holder.agent, now) and holder.key not in self._given_up:
            raise Violation(f"view {view.number} gives up the state that {holder.key} holds")

    def is_given_up(self, agent: AgentId, now: float) -> bool:
        """Return whether a node has been silent to the coordinator for too long.

        A node that has announced its end is waited for until then.
        """
        heard_at, report = self._heard.get(agent, (0.0, None))
        end = heard_at + report.leaves_in_s if report is not None else float("inf")
        return now >= end or now - self._heard_at(agent) >= self._options.abandon_s

    def check_vote(self, view: View, step: int) -> None:
        """Check that too few members stop at the next boundary, and wait for more."""
        first = self._votes.setdefault(view.number, step)
        rested = any(self._options.rests_before(each) for each in range(first + 1, step + 1))
        if len(view.members) < self._options.workers_min and rested:
            raise Violation(f"{len(view.members)} workers go on in view {view.number}")

    def check_release(self, process: Actor, loop: int, newest: View | None) -> None:
        """Check that no worker leaves a loop before the script of a leader has left it."""
        member = newest.member(newest.leader) if newest is not None else None
        leads = member is not None and process.key == (member.worker, member.incarnation)
        if not leads and self._loops_left < loop:
            raise Violation(f"worker {process.key} leaves loop {loop} before a leader has")

    def record_loop_end(self, loop: int) -> None:
        """Record that a script has left a loop."""
        self._loops_left = max(self._loops_left, loop)

    def check_outcome(self, live: Iterable[Actor], now: float) -> None:
        """Check that no process runs when the job is over, but on nodes that are cut off."""
        for process in live:
            if now < self._heard_by_any.get(process.agent, now) + self._fence_s:
                raise Violation(f"the job is said to be over, and worker {process.key} runs")


def _checkpoint_of(view: View) -> int:
    """Return the step of the checkpoint that a view begins from; 0: it begins from none."""
    if view.donors:
        return 0
    if view.recall is None:
        return view.resume_step
    return 0 if view.recall.view else view.recall.base


class EventChecks:
    """Observes the lines of all coordinators; raises Violation when a chain is broken."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}  # by id
        self._causes: dict[str, tuple[str, ...]] = {}
        self._view: View | None = None  # the newest one in a line of the present coordinator
        self._owed: dict[str, int] = {}  # views after a fault, without their end: their numbers

    def record_coordinator_start(self, view: View | None) -> None:
        """Record that a coordinator starts: it does not know the incidents before it."""
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
