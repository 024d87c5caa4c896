"""What the coordinator knows of nodes, of places for workers and of processes. It never decides.

A report is cheap to hear: only a change that could lead to a decision is reported as one. Silence
is counted from the newest report or, for a node that has not spoken yet, from the start.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from holdfast.core.types import (
    NO_VIEW,
    AgentId,
    AgentReport,
    Directive,
    Incarnation,
    JobRecord,
    Slot,
    Stage,
    View,
    ViewNumber,
    WorkerId,
    WorkerStatus,
)


class News(enum.Enum):
    """What a report brings."""

    STALE = "stale"  # it is not the newest: nothing was taken from it
    NOTHING = "nothing"  # nothing that could change a decision
    CHANGE = "change"
    AGENT = "agent"  # it is the first of an agent process


@dataclass(slots=True)
class Node:
    """An agent that has spoken, with what its newest report said."""

    incarnation: Incarnation
    seq: int
    heard_at: float
    offered: int = 0  # slots
    pid: int = 0
    draining: str = ""
    view_known: ViewNumber = NO_VIEW
    view_told: ViewNumber = NO_VIEW
    statuses: dict[WorkerId, WorkerStatus] = field(default_factory=dict)
    sent: Directive | None = None


@dataclass(slots=True)
class Place:
    """A slot for one worker on one node, and the incarnation that should run there."""

    agent: AgentId
    incarnation: Incarnation
    counted: Incarnation = Incarnation(0)  # newest incarnation whose loss was counted
    respawn_at: float | None = None  # set while nothing should run here
    strikes: int = 0  # losses without a clean probation in between
    member_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    agent: AgentId
    incarnation: Incarnation
    pid: int
    silent: bool
    draining: str


class Roster:
    """Nodes by name and places by worker."""

    def __init__(
        self, record: JobRecord | None, now: float, first: Incarnation = Incarnation(1)
    ) -> None:
        self.started_at = now
        self.first = first  # incarnation that may be ordered
        self.nodes: dict[AgentId, Node] = {}
        self.places: dict[WorkerId, Place] = {}
        self.workers_named = record.workers_named if record else 0
        self._by_node: dict[AgentId, list[WorkerId]] = {}
        for slot in record.slots if record else ():
            counted = Incarnation(slot.incarnation - 1)
            self.place(slot.worker, Place(slot.agent, slot.incarnation, counted=counted))

    # ------------------------------------------------------------ hearing

    def hear(self, report: AgentReport, now: float) -> News:
        node = self.nodes.get(report.agent)
        if node is not None and (report.incarnation, report.seq) <= (node.incarnation, node.seq):
            return News.STALE
        anew = node is None or node.incarnation != report.incarnation
        if node is None or anew:
            node = self.nodes[report.agent] = Node(report.incarnation, report.seq, now)
        old, statuses = node.statuses, {s.worker: s for s in report.workers}
        changed = (
            (node.offered, node.draining) != (report.slots, report.draining)
            or len(old) != len(statuses)
            or any(s.worker not in old or differs(old[s.worker], s) for s in report.workers)
        )
        node.seq, node.heard_at, node.pid = report.seq, now, report.pid
        node.draining = report.draining
        node.offered, node.view_known, node.statuses = report.slots, report.view_known, statuses
        return News.AGENT if anew else News.CHANGE if changed else News.NOTHING

    def renew_unheard(self, name: AgentId, view: View | None) -> None:
        """An agent that starts to speak knows nothing of these: what was ordered before is void."""
        for worker in self.here(name):
            acting = view is not None and view.includes(worker, self.places[worker].incarnation)
            if worker not in self.nodes[name].statuses and not acting:
                self.order_anew(worker)

    # ------------------------------------------------------------ places

    def here(self, name: AgentId) -> list[WorkerId]:
        return self._by_node.get(name, [])

    def place(self, worker: WorkerId, place: Place) -> None:
        self.places[worker] = place
        self._by_node.setdefault(place.agent, []).append(worker)
        self.workers_named = max(self.workers_named, worker + 1)

    def admit(self, name: AgentId) -> None:
        """Give a node the places that it offers; it keeps those it has."""
        for _ in range(self.nodes[name].offered - len(self.here(name))):
            self.place(WorkerId(self.workers_named), Place(name, self.first))

    def drain(self, name: AgentId, view: View | None) -> None:
        """Who takes no part here is not wanted now, and never again as the same incarnation."""
        for worker in self.here(name):
            if view is None or not view.includes(worker, self.places[worker].incarnation):
                self.order_anew(worker)

    def dismiss(self, name: AgentId) -> None:
        for worker in self._by_node.pop(name, []):
            del self.places[worker]

    def order_anew(self, worker: WorkerId) -> None:
        """The next incarnation should run here, at once; the present one should end."""
        place = self.places[worker]
        place.incarnation = Incarnation(max(place.incarnation + 1, self.first))
        place.respawn_at = None

    def recall(self, report: AgentReport, view: View | None) -> None:
        """Without a record: what agents run, and who is a member, tells which places there are."""
        members = [(m.worker, m.agent, m.incarnation) for m in view.members] if view else []
        running = [(s.worker, report.agent, s.incarnation) for s in report.workers]
        for worker, agent, incarnation in [*members, *running]:
            place = self.places.get(worker)
            if place is None:
                self.place(worker, Place(agent, incarnation))
            elif place.agent == agent:
                place.incarnation = max(place.incarnation, incarnation)

    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(worker=w, agent=p.agent, incarnation=p.incarnation) for w, p in self.places.items()
        )

    def wanted(self, name: AgentId, view: View | None) -> Iterator[tuple[WorkerId, Incarnation]]:
        """What should run on a node; a lost one never again as the same incarnation.

        On a node that is being drained, only members of the view: nothing starts there.
        """
        draining = self.draining(name)
        for worker in self.here(name):
            place = self.places[worker]
            stays = not draining or (view is not None and view.includes(worker, place.incarnation))
            if place.respawn_at is None and stays:
                yield worker, place.incarnation

    # ------------------------------------------------------------ knowing

    def draining(self, name: AgentId) -> str:
        node = self.nodes.get(name)
        return node.draining if node is not None else ""

    def heard_at(self, name: AgentId) -> float:
        node = self.nodes.get(name)
        return node.heard_at if node is not None else self.started_at

    def status(
        self, worker: WorkerId, incarnation: Incarnation | None = None
    ) -> WorkerStatus | None:
        """The newest status heard; None unless it is of this incarnation, where one is given."""
        place = self.places.get(worker)
        node = self.nodes.get(place.agent) if place else None
        status = node.statuses.get(worker) if node else None
        other = status is not None and incarnation not in (None, status.incarnation)
        return None if other else status

    def known(self) -> dict[WorkerId, WorkerStatus]:
        """The newest status heard of each worker, of whichever incarnation."""
        statuses = [(worker, self.status(worker)) for worker in self.places]
        return {worker: status for worker, status in statuses if status is not None}

    def ordered(self, status: WorkerStatus) -> bool:
        """Whether this very process should run; else its agent has been told to end it."""
        place = self.places.get(status.worker)
        return (
            place is not None
            and place.incarnation == status.incarnation
            and place.respawn_at is None
        )

    def dead(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether the agent has said that the process is gone for good."""
        place = self.places.get(worker)
        node = self.nodes.get(place.agent) if place else None
        if node is None:
            return place is None
        status = node.statuses.get(worker)
        if status is None or status.incarnation > incarnation:
            return True
        return status.incarnation == incarnation and not status.stage.alive

    def snapshot(self, silent: Collection[AgentId]) -> tuple[NodeSnapshot, ...]:
        return tuple(
            NodeSnapshot(
                agent=name,
                incarnation=node.incarnation,
                pid=node.pid,
                silent=name in silent,
                draining=node.draining,
            )
            for name, node in sorted(self.nodes.items())
        )

    def all_exited(self) -> bool:
        stages = [s.stage for s in self.known().values()]
        return 0 < len(stages) == len(self.places) and all(s == Stage.EXITED for s in stages)


_DECISIVE = attrgetter(
    *("incarnation", "stage", "view", "promised", "has_state", "tainted", "at_boundary"),
    *("loop", "ended", "unreached", "detail"),
)


def differs(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Whether something changed that is not mere progress within a view."""
    if _DECISIVE(old) != _DECISIVE(new):
        return True
    at_rest = new.promised >= new.view
    return at_rest and (old.committed, old.reduced) != (new.committed, new.reduced)
