"""Keeps the coordinator's own roster: takes in agents' reports, and applies plans.

A report is cheap to take in: only a change that could lead to a decision is reported as one.
"""

from __future__ import annotations

import dataclasses
import enum
from operator import attrgetter

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import assert_never
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.changes import (
    AddSlot,
    DismissNode,
    NameWorkers,
    OrderNext,
    PutSlot,
    RosterChange,
    SetDrain,
    WantSpares,
    WelcomeNode,
)
from holdfast.engine.core.membership.roster import NodeState, Roster, SlotState
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus

SOONER_S = 0.5  # a node's end that comes nearer by less is no news


class News(enum.Enum):
    """Classifies a report."""

    #: It was not the newest report, and was dropped.
    STALE = "stale"
    #: It can change no decision.
    NOTHING = "nothing"
    CHANGE = "change"


class LiveRoster(Roster):
    """Is the roster that changes: by reports, and by plans."""

    def __init__(
        self, record: JobRecord | None, now: float, first: Incarnation = Incarnation(1)
    ) -> None:
        super().__init__(record, now, first)
        for slot in record.slots if record else ():
            counted = Incarnation(slot.incarnation - 1)
            state = SlotState(slot.agent, slot.incarnation, counted, role=slot.role)
            self._put_slot(slot.worker, dataclasses.replace(state, further=slot.further))

    def hear(self, report: AgentReport, now: float) -> News:
        """Take in a report that came at `now` (seconds); return whether it is news."""
        old = self._nodes.get(report.agent)
        if old is not None and (
            (report.incarnation, report.seq) <= (old.report.incarnation, old.report.seq)
        ):
            return News.STALE
        self.version += 1
        statuses = {status.worker: status for status in report.workers}
        if old is None or old.report.incarnation != report.incarnation:
            old = NodeState(report=report, statuses={}, heard_at=now)
        same = _OFFERS(old.report) == _OFFERS(report) and len(old.statuses) == len(statuses)
        changed = old.fresh or not same
        for worker, status in statuses.items():
            last = old.statuses.get(worker)
            if last is None or has_changed(last, status):
                changed = True
            if last is not None and has_moved(last, status):
                self.moved_at = now
        leave_by = now + report.leaves_in_s
        changed |= leave_by < old.leave_by - SOONER_S
        self._nodes[report.agent] = NodeState(
            report=report,
            statuses=statuses,
            heard_at=now,
            leave_by=min(old.leave_by, leave_by) if report.draining else float("inf"),
            draining=old.draining,
            spares_wanted=old.spares_wanted,
            fresh=old.fresh,
        )
        self._note_newest(report.agent)
        return News.CHANGE if changed else News.NOTHING

    def apply(self, change: RosterChange) -> None:
        """Carry out one change that was decided."""
        self.version += 1
        match change:
            case AddSlot(slot):
                self._put_slot(WorkerId(self.workers_named), slot)
            case PutSlot(worker, slot):
                self._put_slot(worker, slot)
            case OrderNext(worker):
                self._put_slot(worker, self.slots[worker].order_next(self.first))
            case DismissNode(agent):
                self._dismiss(agent)
            case NameWorkers(count):
                self.workers_named = max(self.workers_named, count)
            case WelcomeNode(agent):
                self._nodes[agent] = dataclasses.replace(self.nodes[agent], fresh=False)
            case SetDrain(agent, reason):
                self._nodes[agent] = dataclasses.replace(self.nodes[agent], draining=reason)
            case WantSpares(agent, spares):
                self._nodes[agent] = dataclasses.replace(self.nodes[agent], spares_wanted=spares)
            case _:
                assert_never(change)

    def _put_slot(self, worker: WorkerId, slot: SlotState) -> None:
        self._is_changed = True
        is_new = worker not in self._slots
        self._slots[worker] = slot
        if not is_new:
            return
        self._by_node[slot.agent] = (*self.workers_of(slot.agent), worker)
        for name in slot.further:
            self._beside[name] = (*self._beside.get(name, ()), worker)
        self.workers_named = max(self.workers_named, worker + 1)
        if slot.agent in self._nodes:
            self._note_newest(slot.agent)

    def _dismiss(self, name: AgentId) -> None:
        self._is_changed = True
        for worker in self.workers_on(name):
            slot = self._slots.pop(worker)
            self._newest.pop(worker, None)
            for table, names in ((self._by_node, (slot.agent,)), (self._beside, slot.further)):
                for each in names:
                    table[each] = tuple(other for other in table[each] if other != worker)
                    if not table[each]:
                        del table[each]

    def _note_newest(self, name: AgentId) -> None:
        statuses = self._nodes[name].statuses
        for worker in self.workers_of(name):
            if worker in statuses:
                self._newest[worker] = statuses[worker]
            else:
                self._newest.pop(worker, None)


_OFFERS = attrgetter("slots", "spares", "draining", "failing", "ending", "leaving", "servers")
_DECISIVE = attrgetter(
    *("incarnation", "stage", "view", "promised", "state", "at_boundary", "late", "ended"),
    *("has_left_loop", "saving"),
    *("loop", "unreached", "saved", "unreadable", "invalidations", "events", "detail"),
    *("address", "meets_at", "abreast", "unfed", "unrecalled", "heirs", "layout"),
)
_RESTING = attrgetter("committed", "reduced", "waiting")
_MOVING = attrgetter("committed", "waiting", "activity")


def has_changed(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Return whether something changed that is not mere progress within a view."""
    if _DECISIVE(old) != _DECISIVE(new):
        return True
    return new.has_stopped and _RESTING(old) != _RESTING(new)


def has_moved(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Return whether this process has progressed, or has begun or ended to wait."""
    same = old.incarnation == new.incarnation
    return same and _MOVING(old) != _MOVING(new)
