"""Makes the lines of the job's event log: each event once, with its id and its causes. Pure.

Statuses repeat the events of workers, so `EventLog` finds the new ones. `EventChain` links the
lines, and remembers which incidents are open. An incident begins with a fault, continues with a
view that leaves a member out, and ends with the first step that a member commits in that view. A
line on a silent node, or on wrong results or bytes, is a sign: it becomes a part of the incident
that follows, or of the open one. The chain decides no other thing, and adds the node of the worker
that each line names. It must not know texts: it reads kinds, workers, nodes and views."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.job_record import Slot
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    Cost,
    ReportArrived,
)
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import JobEvent, WorkerStatus

ROOM = "room"  # kind of events on the run directory's file system, from each worker that uses it
# Kinds that are not about the worker that reports them.
OF_THE_JOB = ("wrong", "not_finite", ROOM)
Rotten = tuple[ViewNumber, str]  # a view, and the checkpoint that its members cannot read
FAULTS = (
    "lost",
    "replaced",
    "quarantined",
    "stop_view",
    "restart",
    "back",
    "leave",
    "late",
)  # kinds of lines that begin incidents
SIGNS = ("wrong", "rot")
PLANS = ("join", "drain", "wait")  # the next view is formed on purpose
ENDS = ("failed", "stop")
RESUMED = "resumed"
CAUSES_MAX = 64  # a larger outage names the newest


def _find_subject(event: JobEvent, reporter: WorkerId) -> WorkerId | None:
    """Return the worker that an event is about; None: no single one."""
    if event.about is None and event.kind not in OF_THE_JOB:
        return reporter
    return event.about


class EventLog:
    """Finds events that are new.

    Every member of a view may find the same damaged checkpoint, or the same disk full: only the
    first event on it is new.

    `before`: processes that reported to another coordinator, which has logged their first events.
    """

    def __init__(self, before: Iterable[Slot]) -> None:
        self._told: dict[WorkerId, tuple[Incarnation, int]] = {}
        self._before = {(slot.worker, slot.incarnation) for slot in before}
        self._rotten: dict[Rotten, bool] = {}
        self._room = ""  # the last event on the room that workers have

    def is_told(self, status: WorkerStatus) -> bool:
        """Return whether all events of a worker are marked as logged."""
        if not status.events:
            return True
        return self._told.get(status.worker) == (status.incarnation, status.events[-1].number)

    def news(self, statuses: Iterable[WorkerStatus]) -> list[Announce]:
        """Return the events of workers that are not logged yet."""
        found, rotten, room = list[Announce](), dict(self._rotten), self._room
        for status in statuses:
            for event in self._find_new(status):
                checkpoint = _find_rotten(status, event)
                is_known = event.kind == ROOM and event.text == room
                room = event.text if event.kind == ROOM else room
                if checkpoint not in rotten and not is_known:
                    about = _find_subject(event, status.worker)
                    found.append(Announce(event.kind, event.text, about))
                if checkpoint is not None:
                    rotten[checkpoint] = True
        return found

    def mark(self, status: WorkerStatus) -> None:
        """Mark the events of a worker as logged."""
        new = self._find_new(status)
        found = (_find_rotten(status, event) for event in new)
        self._rotten.update({each: True for each in found if each is not None})
        self._room = next((e.text for e in reversed(new) if e.kind == ROOM), self._room)
        self._told[status.worker] = status.incarnation, status.events[-1].number

    def _find_new(self, status: WorkerStatus) -> list[JobEvent]:
        worker, newest = status.worker, status.events[-1].number if status.events else 0
        incarnation, told = self._told.get(worker, (None, 0))
        if incarnation != status.incarnation:
            told = newest if (worker, status.incarnation) in self._before else 0
        return [event for event in status.events if event.number > told]


def _find_rotten(status: WorkerStatus, event: JobEvent) -> Rotten | None:
    """Return the checkpoint that an event calls damaged, with the view that found it."""
    return (status.view, event.text.partition(": ")[0]) if event.kind == "rot" else None


@dataclasses.dataclass(slots=True)
class _Incident:
    """Collects the faults since the last commit."""

    seen_at: float
    #: The members of the view before.
    workers: int
    #: The ids of the faults.
    faults: list[str] = dataclasses.field(default_factory=list)
    #: The id of the newest view since.
    view_event: str = ""
    #: The virtual ranks of members left out by views since.
    tasks: int = 0
    #: The steps to be computed again.
    steps: int = 0


class EventChain:
    """Links the lines of one term; `link` is its only mutator."""

    def __init__(self, term: int, view: View | None) -> None:
        self._term = term
        self._view = view
        self._count = 0
        self._reached = view.resume_step if view else 0  # the newest step in members' reports
        self._open: _Incident | None = None
        self._next: _Incident | None = None  # faults in the view that answers the open one
        self._planned = ""  # id of the last plan to change the view
        self._silent: dict[AgentId, str] = {}  # ids of the lines on silent nodes
        self._signs: list[str] = []  # ids of the lines of SIGNS in this step
        self._signed_at = 0  # the newest step when the last of them came
        self._left_out: dict[WorkerId, str] = {}  # the id of the view that left a worker out

    def link(
        self,
        event: CoordinatorEvent,
        effects: list[CoordinatorEffect],
        view: View | None,
        now: float,
    ) -> list[CoordinatorEffect]:
        """Return the effects of an event, where each line has its id and causes."""
        if isinstance(event, ReportArrived):
            resumed = self.take_in(event.report, now)
            effects = [resumed, *effects] if resumed else effects
        return [
            self.number(effect, view, now) if isinstance(effect, Announce) else effect
            for effect in effects
        ]

    def take_in(self, report: AgentReport, now: float) -> Announce | None:
        """Take in how far members are; return the last line of an incident that ends."""
        view = self._view
        if view is None:
            return None
        for status in report.workers:
            if view.includes(status.worker, status.incarnation) and status.view == view.number:
                self._reached = max(self._reached, status.committed)
        found = self._open
        if found is None or not found.view_event or self._reached <= view.resume_step:
            return None
        self._open, self._next = self._next, None
        pause_s = max(now - found.seen_at, 0.0)
        missing = max(found.workers - len(view.members), 0)
        text = f"step {view.resume_step} is committed, {pause_s:.2f} s after the fault was seen"
        return Announce(
            RESUMED,
            text,
            None,
            view.number,
            view.resume_step,
            causes=(found.view_event,),
            cost=Cost(pause_s, found.tasks, found.steps, missing),
        )

    def number(self, line: Announce, view: View | None, now: float) -> Announce:
        """Return the line with its id and causes. `view`: the present one, after all decisions."""
        self._count += 1
        name = f"{self._term}.{self._count}"
        causes = line.causes
        if line.kind == "silent" and line.node is not None:
            self._silent[line.node] = name
            if any(line.node in member.nodes for member in self._members):
                self._add_sign(name, now)
        elif line.kind == "node" and line.node is not None:
            heard = self._silent.pop(line.node, "")
            causes = (heard,) if heard else ()
        elif line.kind in SIGNS:
            causes = tuple(self._fresh_signs())
            self._signs, self._signed_at = [*causes, name], self._reached
            self._add_sign(name, now)
        elif line.kind in FAULTS:
            causes = self._add_fault(line, name, now)
        elif line.kind in PLANS:
            self._planned = name
            if line.kind == "drain":
                self._begin(name, now)
        elif line.kind == "view" and view is not None:
            causes = self._enter(view, name)
        elif line.kind in ENDS and self._open is not None:
            causes = tuple(self._faults)
        node = line.node or self._find_node(line.worker)
        return dataclasses.replace(line, id=name, causes=causes[-CAUSES_MAX:], node=node)

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._view.members if self._view is not None else ()

    def _find_node(self, worker: WorkerId | None) -> AgentId | None:
        """Return the node of a member of the view."""
        return next((m.agent for m in self._members if m.worker == worker), None)

    def _fresh_signs(self) -> list[str]:
        """Return the ids of the lines on wrong results and bytes since the last committed step."""
        return self._signs if self._reached <= self._signed_at + 1 else []

    def _add_sign(self, name: str, now: float) -> None:
        """Add a sign to the incident that is open, if no view has answered that yet."""
        if self._open is not None and not self._open.view_event:
            self._begin(name, now)

    def _begin(self, name: str, now: float) -> None:
        found = self._open if self._open is None or not self._open.view_event else self._next
        if found is None:
            found = _Incident(seen_at=now, workers=len(self._members))
            if self._open is None:
                self._open = found
            else:
                self._next = found
        found.faults = [*found.faults, name][-CAUSES_MAX:]

    @property
    def _faults(self) -> list[str]:
        """Return the ids of all faults that no commit has followed yet."""
        return [name for each in (self._open, self._next) if each for name in each.faults]

    def _add_fault(self, line: Announce, name: str, now: float) -> tuple[str, ...]:
        """Begin an incident or add to it; the fault of a worker left out belongs to that view."""
        view, worker = self._view, line.worker
        member = view.member(worker) if view and worker is not None else None
        if worker is not None and member is None:
            left_out_by = self._left_out.get(worker, "")
            return (left_out_by,) if left_out_by else ()
        about = self._members if member is None else (member,)
        nodes = {node: True for each in about for node in each.nodes}
        causes = [told for node, told in self._silent.items() if node in nodes]
        if line.kind == "leave" and self._planned:
            causes.append(self._planned)
        if line.kind != "leave":
            causes += self._fresh_signs()
        if line.kind == "stop_view" and self._open is not None:
            causes += self._faults
        self._begin(name, now)
        return tuple(causes)

    def _enter(self, view: View, name: str) -> tuple[str, ...]:
        """Link a view with its causes."""
        before, self._view = self._view, view
        causes, self._planned = ([self._planned] if self._planned else []), ""
        if self._open is not None:  # without a commit in between all is one incident
            self._open.faults, self._next = self._faults, None
        found, staying = self._open, frozenset(view.workers)
        for member in before.members if before else ():
            if member.worker not in staying:
                self._left_out[member.worker] = name
        for worker in view.workers:
            self._left_out.pop(worker, None)
        if found is not None and before is not None:
            causes = [*found.faults, *(c for c in causes if c not in found.faults)]
            found.view_event = name
            found.tasks += sum(owner not in staying for owner in before.owners)
            found.steps += max(self._reached - view.resume_step, 0)
        elif before is None:
            self._open = None  # faults before the job began have cost no step
        self._signs.clear()
        self._reached = view.resume_step
        return tuple(causes)
