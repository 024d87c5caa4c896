"""Answers questions about nodes, slots for workers and processes. It cannot be changed here.

Decisions read a `Roster`, whose values are all immutable. The coordinator alone owns the
`LiveRoster` (live_roster.py), which takes in reports and applies changes. Silence is counted from
the newest report or, for a node that has not reported yet, from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.hosted_service import RunningServer
from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.core.types import AgentId, Incarnation, ProcessRole, WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """Keeps the newest report of an agent, and decisions about its node."""

    #: The newest report.
    report: AgentReport
    #: The statuses in that report.
    statuses: Mapping[WorkerId, WorkerStatus]
    #: The time of that report, in seconds.
    heard_at: float
    #: The node is gone by this time, in seconds.
    leave_by: float = float("inf")
    #: The reason for which it is drained; empty: it is not.
    draining: str = ""
    #: The number of its offered spares that are used.
    spares_wanted: int = 1 << 30
    #: No decision was made yet since its agent's first report.
    fresh: bool = True

    @property
    def processes_for(self) -> int:
        """Return the number of its slots that are used."""
        return self.report.slots - max(self.report.spares - self.spares_wanted, 0)


@dataclass(frozen=True, slots=True)
class SlotState:
    """Describes a slot for one worker on one node, and the incarnation that should run there."""

    agent: AgentId
    incarnation: Incarnation
    #: The newest incarnation whose loss was counted.
    counted: Incarnation = Incarnation(0)
    #: The time of the next start; set while no process should run here.
    respawn_at: float | None = None
    #: The losses without a clean probation in between.
    strikes: int = 0
    #: The times that it was found to compute wrongly, likewise.
    wrongs: int = 0
    member_since: float | None = None
    role: ProcessRole = ProcessRole.WORKER
    #: The other nodes of a worker that is spread over several.
    further: tuple[AgentId, ...] = ()

    @property
    def nodes(self) -> tuple[AgentId, ...]:
        """Return all of its nodes, in their order."""
        return (self.agent, *self.further)

    def order_next(self, first: Incarnation) -> SlotState:
        """Return the slot with its next incarnation, at least `first`, that is to run at once."""
        number = Incarnation(max(self.incarnation + 1, first))
        return dataclasses.replace(self, incarnation=number, respawn_at=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    agent: AgentId
    incarnation: Incarnation
    pid: int
    silent: bool
    draining: str
    domains: Domains
    kept: tuple[KeptPieces, ...] = ()
    pieces_bytes: int = 0
    servers: tuple[RunningServer, ...] = ()


class Roster:
    """Knows nodes by name and slots by worker, for all decisions: it cannot be changed here.

    `newest`: the newest status of each slot's worker, of whichever incarnation. `moved_at`: when a
    report last showed that a worker has progressed, or has begun or ended to wait. `first`: the
    least incarnation that may be ordered.
    """

    def __init__(
        self, record: JobRecord | None, now: float, first: Incarnation = Incarnation(1)
    ) -> None:
        self.started_at = self.moved_at = now
        self.first = first
        self.version = 0  # grows with each report and each change
        self.workers_named = record.workers_named if record else 0
        self._nodes: dict[AgentId, NodeState] = {}
        self._slots: dict[WorkerId, SlotState] = {}
        self._newest: dict[WorkerId, WorkerStatus] = {}
        self._records = record.slots if record else ()
        self._is_changed = True  # a slot, since the records were made
        self._by_node: dict[AgentId, tuple[WorkerId, ...]] = {}
        self._beside: dict[AgentId, tuple[WorkerId, ...]] = {}  # by the further nodes of workers
        self.nodes: Mapping[AgentId, NodeState] = MappingProxyType(self._nodes)
        self.slots: Mapping[WorkerId, SlotState] = MappingProxyType(self._slots)
        self.newest: Mapping[WorkerId, WorkerStatus] = MappingProxyType(self._newest)

    def workers_of(self, name: AgentId) -> tuple[WorkerId, ...]:
        """Return the workers that this is the node of, or the first of their nodes."""
        return self._by_node.get(name, ())

    def workers_on(self, name: AgentId) -> tuple[WorkerId, ...]:
        """Return all workers that have processes on a node."""
        return self.workers_of(name) + self._beside.get(name, ())

    def slot_records(self) -> tuple[Slot, ...]:
        """Return the part of each slot that a coordinator must not forget.

        Equal records are the same object, so that comparing them takes no time.
        """
        if self._is_changed:
            found = tuple(
                Slot(
                    worker=w,
                    agent=p.agent,
                    incarnation=p.incarnation,
                    role=p.role,
                    further=p.further,
                )
                for w, p in self.slots.items()
            )
            self._records = self._records if self._records == found else found
            self._is_changed = False
        return self._records

    # ------------------------------------------------------------ knowing

    def draining(self, name: AgentId) -> str:
        node = self.nodes.get(name)
        return node.draining if node is not None else ""

    def drained_node(self, worker: WorkerId) -> AgentId | None:
        """Return a node of a worker that is being drained, if there is one."""
        slot = self.slots.get(worker)
        return next((n for n in slot.nodes if self.draining(n)), None) if slot else None

    def reason_to_leave(self, worker: WorkerId) -> str:
        """Return the reason why a member should leave the job's views, or ""."""
        if drained := self.drained_node(worker):
            return self.draining(drained)
        slot = self.slots.get(worker)
        node = self.nodes.get(slot.agent) if slot is not None else None
        if slot is None or node is None:
            return ""
        named = (worker, slot.incarnation)
        found = (each for each in node.report.leaving if (each.worker, each.incarnation) == named)
        return next((each.reason for each in found), "")

    def awaits_worker(self, name: AgentId) -> bool:
        """Return whether a worker is to be moved to this node."""
        every = (each for node in self.nodes.values() for each in node.report.leaving)
        return any(each.to == name and self.wants(each.worker, each.incarnation) for each in every)

    @property
    def nodes_with_places(self) -> list[AgentId]:
        """Return the nodes that workers have places on, also those that have not reported yet."""
        return list(dict.fromkeys([*self._by_node, *self._beside]))

    @property
    def first_nodes(self) -> list[AgentId]:
        """Return the nodes that are the first ones of some workers."""
        return list(self._by_node)

    def unheard_nodes(self) -> list[AgentId]:
        """List nodes that have slots and have not reported yet."""
        return [name for name in self.nodes_with_places if name not in self.nodes]

    def heard_at(self, name: AgentId) -> float:
        node = self.nodes.get(name)
        return node.heard_at if node is not None else self.started_at

    def status(
        self, worker: WorkerId, incarnation: Incarnation | None = None
    ) -> WorkerStatus | None:
        """Return the newest status; None unless it is of this incarnation, if one is given."""
        status = self.newest.get(worker)
        other = status is not None and incarnation not in (None, status.incarnation)
        return None if other else status

    def is_ordered(self, status: WorkerStatus) -> bool:
        """Return whether this very process should run; else its agent has the order to end it."""
        return self.wants(status.worker, status.incarnation)

    def wants(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this incarnation should run."""
        slot = self.slots.get(worker)
        return slot is not None and slot.incarnation == incarnation and slot.respawn_at is None

    def is_dead(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether the agent has reported the process's end, or its node is dismissed."""
        slot = self.slots.get(worker)
        if slot is None or slot.agent not in self.nodes:
            return slot is None
        return self._has_ended(self.newest.get(worker), incarnation)

    def is_crippled(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether processes of a spread member have ended on one of its further nodes.

        Then it can commit no step any more.
        """
        slot = self.slots.get(worker)
        names = slot.further if slot is not None else ()
        if not names:
            return False
        heard = [self.nodes[name] for name in names if name in self.nodes]
        return any(self._has_ended(node.statuses.get(worker), incarnation) for node in heard)

    @staticmethod
    def _has_ended(status: WorkerStatus | None, incarnation: Incarnation) -> bool:
        if status is None or status.incarnation > incarnation:
            return True
        return status.incarnation == incarnation and not status.stage.alive

    def is_complete(self, status: WorkerStatus) -> bool:
        """Return whether the processes of a worker run on all of its nodes, by their reports."""
        nodes = [self.nodes.get(name) for name in self.slots[status.worker].further]
        found = [node.statuses.get(status.worker) if node is not None else None for node in nodes]
        return all(
            s is not None and s.incarnation == status.incarnation and s.stage.alive for s in found
        )

    def failed_workers(self) -> list[WorkerStatus]:
        """Return the statuses of processes whose script has failed, on any node."""
        found = [status for status in self.newest.values() if status.stage == Stage.FAILED]
        for name, workers in self._beside.items():
            statuses = self.nodes[name].statuses if name in self.nodes else {}
            told = [statuses[worker] for worker in workers if worker in statuses]
            found += [status for status in told if status.stage == Stage.FAILED]
        return found


def describe_nodes(roster: Roster, silent: Collection[AgentId]) -> tuple[NodeSnapshot, ...]:
    """Return the nodes by name, for people; `silent`: the nodes that are."""
    return tuple(
        NodeSnapshot(
            agent=name,
            incarnation=node.report.incarnation,
            pid=node.report.pid,
            silent=name in silent,
            draining=node.draining,
            domains=node.report.domains,
            kept=node.report.kept,
            pieces_bytes=node.report.pieces_bytes,
            servers=node.report.servers,
        )
        for name, node in sorted(roster.nodes.items())
    )


def have_all_ended(roster: Roster, now: float, fence_s: float) -> bool:
    """Return whether no process can run any more; silent nodes end theirs by themselves.

    A process that a node has the order to start, and has not reported, may run until its agent
    knows.
    """
    if now < roster.started_at + fence_s:
        if roster.unheard_nodes():
            return False
    return all(
        node.report.ending and not any(status.stage.alive for status in node.statuses.values())
        for node in roster.nodes.values()
        if now < node.heard_at + fence_s
    )


def have_all_exited(roster: Roster) -> bool:
    """Return whether the script of every worker has ended as it should."""
    newest = roster.newest
    everyone = 0 < len(newest) == len(roster.slots)
    return everyone and all(status.stage is Stage.EXITED for status in newest.values())
