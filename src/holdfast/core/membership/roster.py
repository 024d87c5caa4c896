"""Knows the nodes, the slots for workers and the processes, for the coordinator. It never decides.

A report is cheap to hear: only a change that could lead to a decision is reported as one. Silence
is counted from the newest report or, for a node that has not spoken yet, from the start.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from holdfast.core.domains import Domains
from holdfast.core.redundancy import KeptPieces
from holdfast.core.types import (
    NO_VIEW,
    AgentId,
    AgentReport,
    Incarnation,
    JobRecord,
    Leaving,
    ProcessRole,
    Slot,
    Stage,
    View,
    ViewNumber,
    WantedProcess,
    WorkerId,
    WorkerStatus,
)

SOONER_S = 0.5  # by so much a node's end must come nearer to be news


class News(enum.Enum):
    """Says what a report brings."""

    STALE = "stale"  # it is not the newest: nothing was taken from it
    NOTHING = "nothing"  # nothing that could change a decision
    CHANGE = "change"


@dataclass(slots=True)
class NodeState:
    """Holds what is known of an agent that has spoken, with its newest report."""

    incarnation: Incarnation
    seq: int
    heard_at: float
    offered: int = 0  # slots
    spares: int = 0  # so many of them are for workers that are held back
    spares_wanted: int = 1 << 30  # of these
    pid: int = 0
    asks: str = ""  # why it asks to be drained
    failing: str = ""  # the failed check for which it asks, unless a person does
    draining: str = ""  # why it is drained
    leave_by: float = float("inf")  # it is gone by then
    leaving: tuple[Leaving, ...] = ()  # workers that are to be moved
    domains: Domains = ()  # failure domains that it is in
    kept: tuple[KeptPieces, ...] = ()  # what its memory holds
    pieces_at: str = ""  # HOST:PORT where it serves that
    pieces_bytes: int = 0  # that it takes
    ending: bool = False  # its agent knows that the job is over
    fresh: bool = True  # nothing has been decided yet since it first spoke
    view_known: ViewNumber = NO_VIEW
    view_told: ViewNumber = NO_VIEW
    told: object = None  # what was sent last, but for the view
    statuses: dict[WorkerId, WorkerStatus] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """Return how many of its slots are used."""
        return self.offered - max(self.spares - self.spares_wanted, 0)


@dataclass(slots=True)
class SlotState:
    """Holds a slot for one worker on one node, and the incarnation that should run there."""

    agent: AgentId
    incarnation: Incarnation
    counted: Incarnation = Incarnation(0)  # newest incarnation whose loss was counted
    respawn_at: float | None = None  # set while nothing should run here
    strikes: int = 0  # losses without a clean probation in between
    wrongs: int = 0  # how often it was found to compute wrongly, likewise
    member_since: float | None = None
    role: ProcessRole = ProcessRole.WORKER
    further: tuple[AgentId, ...] = ()  # nodes over which it is spread, too

    @property
    def nodes(self) -> tuple[AgentId, ...]:
        """Return all of its nodes, in their order."""
        return (self.agent, *self.further)


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


class Roster:
    """Knows nodes by name and slots by worker.

    `newest`: the newest status heard of each slot's worker, of whichever incarnation. `moved_at`:
    when a worker was last heard to have come further, or to have begun or ended to wait.
    """

    def __init__(
        self, record: JobRecord | None, now: float, first: Incarnation = Incarnation(1)
    ) -> None:
        self.started_at = self.moved_at = now
        self.first = first  # incarnation that may be ordered
        self.nodes: dict[AgentId, NodeState] = {}
        self.slots: dict[WorkerId, SlotState] = {}
        self.newest: dict[WorkerId, WorkerStatus] = {}
        self.workers_named = record.workers_named if record else 0
        self._records: tuple[Slot, ...] | None = None  # cached until a slot changes
        self._by_node: dict[AgentId, list[WorkerId]] = {}
        self._beside: dict[AgentId, list[WorkerId]] = {}  # of whom it is a further node
        for slot in record.slots if record else ():
            counted = Incarnation(slot.incarnation - 1)
            state = SlotState(slot.agent, slot.incarnation, counted=counted, role=slot.role)
            state.further = slot.further
            self.add_slot(slot.worker, state)

    # ------------------------------------------------------------ hearing

    def hear(self, report: AgentReport, now: float) -> News:
        node = self.nodes.get(report.agent)
        if node is not None and (report.incarnation, report.seq) <= (node.incarnation, node.seq):
            return News.STALE
        if node is None or node.incarnation != report.incarnation:
            node = self.nodes[report.agent] = NodeState(report.incarnation, report.seq, now)
        old, statuses = node.statuses, {s.worker: s for s in report.workers}
        before = (node.offered, node.spares, node.asks, node.failing, node.ending, node.leaving)
        asks = (report.draining, report.failing, report.ending, report.leaving)
        offers = (report.slots, report.spares, *asks)
        changed = node.fresh or before != offers or len(old) != len(statuses)
        for worker, status in statuses.items():
            last = old.get(worker)
            if last is None or differs(last, status):
                changed = True
            if last is not None and moved(last, status):
                self.moved_at = now
        node.seq, node.heard_at, node.pid = report.seq, now, report.pid
        node.offered, node.spares = report.slots, report.spares
        node.asks, node.failing, node.ending, node.leaving = asks
        leave_by = now + report.leaves_in_s
        changed |= leave_by < node.leave_by - SOONER_S
        node.leave_by = min(node.leave_by, leave_by) if report.draining else float("inf")
        node.view_known, node.statuses = report.view_known, statuses
        node.domains, node.kept = report.domains, report.kept
        node.pieces_at, node.pieces_bytes = report.pieces_at, report.pieces_bytes
        self._note_newest(report.agent)
        return News.CHANGE if changed else News.NOTHING

    def welcome(self, name: AgentId, view: View | None, recall: bool) -> None:
        """Replace what an agent that begins to speak should run and does not know, unless it acts.

        `recall`: what it runs may have been ordered without our knowing.
        """
        node = self.nodes[name]
        node.fresh = False
        if recall:
            self.recall(name, node.statuses.values(), None)
        for worker in self.on(name):
            acting = view is not None and view.includes(worker, self.slots[worker].incarnation)
            if worker not in node.statuses and not acting:
                self.order_anew(worker)

    def _note_newest(self, name: AgentId) -> None:
        statuses = self.nodes[name].statuses
        for worker in self.here(name):
            if worker in statuses:
                self.newest[worker] = statuses[worker]
            else:
                self.newest.pop(worker, None)

    # ------------------------------------------------------------ slots

    def here(self, name: AgentId) -> list[WorkerId]:
        """Return the workers that this is the node of, or the first of their nodes."""
        return self._by_node.get(name, [])

    def on(self, name: AgentId) -> list[WorkerId]:
        """Return all workers that have processes on a node."""
        return [*self.here(name), *self._beside.get(name, [])]

    def add_slot(self, worker: WorkerId, slot: SlotState) -> None:
        self._records = None
        self.slots[worker] = slot
        self._by_node.setdefault(slot.agent, []).append(worker)
        for name in slot.further:
            self._beside.setdefault(name, []).append(worker)
        self.workers_named = max(self.workers_named, worker + 1)
        if slot.agent in self.nodes:
            self._note_newest(slot.agent)

    def admit(self, name: AgentId) -> None:
        """Give a node the slots that it should have; it keeps those it has."""
        for _ in range(self.nodes[name].wanted - len(self.here(name))):
            self.add_slot(WorkerId(self.workers_named), SlotState(name, self.first))

    def admit_together(self, names: Sequence[AgentId]) -> None:
        """Give nodes the slots of workers that are spread over them, in this order."""
        for _ in range(min(self.nodes[name].wanted for name in names)):
            slot = SlotState(names[0], self.first, further=tuple(names[1:]))
            self.add_slot(WorkerId(self.workers_named), slot)

    def drain(self, name: AgentId, view: View | None) -> None:
        """Replace the processes here that take no part; nothing starts while the node drains."""
        for worker in self.on(name):
            if view is None or not view.includes(worker, self.slots[worker].incarnation):
                self.order_anew(worker)

    def dismiss(self, name: AgentId) -> None:
        """Take a node's slots away, those of workers that it is a further node of as well."""
        self._records = None
        for worker in self.on(name):
            slot = self.slots.pop(worker)
            self.newest.pop(worker, None)
            for table, names in ((self._by_node, (slot.agent,)), (self._beside, slot.further)):
                for each in names:
                    table[each].remove(worker)
                    if not table[each]:
                        del table[each]

    def order_anew(self, worker: WorkerId) -> None:
        """Order the next incarnation to run here at once, and the present one to end."""
        self._records = None
        slot = self.slots[worker]
        slot.incarnation = Incarnation(max(slot.incarnation + 1, self.first))
        slot.respawn_at = None

    def recall(self, name: AgentId, statuses: Iterable[WorkerStatus], view: View | None) -> None:
        """Restore slots from what agents run, and who is a member, when the record is lost."""
        self._records = None
        members = (
            [(m.worker, m.agent, m.incarnation, m.further) for m in view.members] if view else []
        )
        # Of a spread worker's nodes the view alone knows: others of them are not taken back.
        running = [(s.worker, name, s.incarnation, ()) for s in statuses if not s.meets_at]
        for worker, agent, incarnation, further in [*members, *running]:
            slot = self.slots.get(worker)
            if slot is None:
                self.add_slot(worker, SlotState(agent, incarnation, further=further))
            elif slot.agent == agent:
                slot.incarnation = max(slot.incarnation, incarnation)
        self.workers_named = max([self.workers_named, *(s.worker + 1 for s in statuses)])

    def slot_records(self) -> tuple[Slot, ...]:
        if self._records is None:
            self._records = tuple(
                Slot(
                    worker=w,
                    agent=p.agent,
                    incarnation=p.incarnation,
                    role=p.role,
                    further=p.further,
                )
                for w, p in self.slots.items()
            )
        return self._records

    def wanted(self, name: AgentId, view: View | None) -> Iterator[WantedProcess]:
        """Find what should run on a node; a lost process never again as the same incarnation.

        On a node that is being drained these are only members of the view: nothing starts there.
        """
        for worker in self.on(name):
            slot = self.slots[worker]
            acts = view is not None and view.includes(worker, slot.incarnation)
            stays = acts or not self.drained_of(worker)
            if slot.respawn_at is None and stays:
                yield from self._wanted_as(worker, slot.incarnation, name)

    def leaving(self, name: AgentId, view: View | None) -> Iterator[WantedProcess]:
        """Find what may finish on a node as the job ends: living members of the view.

        A member that promised before it had the state can never get it any more.
        """
        for worker in self.on(name):
            member = view.member(worker) if view is not None else None
            if view is None or member is None or self.dead(worker, member.incarnation):
                continue
            status = self.status(worker, member.incarnation)
            stranded = status and status.promised >= view.number and not status.has_state
            if not stranded:
                yield from self._wanted_as(worker, member.incarnation, name)

    def _wanted_as(
        self, worker: WorkerId, incarnation: Incarnation, name: AgentId
    ) -> Iterator[WantedProcess]:
        """Yield what should run of a worker on a node; on further ones, once the first one does."""
        slot, status = self.slots[worker], self.status(worker, incarnation)
        meets_at = status.meets_at if status is not None and name != slot.agent else ""
        if name == slot.agent or meets_at:
            yield WantedProcess(
                worker=worker,
                incarnation=incarnation,
                role=slot.role,
                place=slot.nodes.index(name),
                meets_at=meets_at,
            )

    # ------------------------------------------------------------ knowing

    def draining(self, name: AgentId) -> str:
        node = self.nodes.get(name)
        return node.draining if node is not None else ""

    def drained_of(self, worker: WorkerId) -> AgentId | None:
        """Return a node of a worker that is being drained, if there is one."""
        slot = self.slots.get(worker)
        return next((n for n in slot.nodes if self.draining(n)), None) if slot else None

    def leaves(self, worker: WorkerId) -> str:
        """Return why a member should leave the job's views, or ""."""
        if drained := self.drained_of(worker):
            return self.draining(drained)
        slot = self.slots.get(worker)
        node = self.nodes.get(slot.agent) if slot is not None else None
        if slot is None or node is None:
            return ""
        named = (worker, slot.incarnation)
        found = (each for each in node.leaving if (each.worker, each.incarnation) == named)
        return next((each.reason for each in found), "")

    def awaits_worker(self, name: AgentId) -> bool:
        """Tell whether a worker is to be moved to this node."""
        every = (each for node in self.nodes.values() for each in node.leaving)
        return any(each.to == name and self.wants(each.worker, each.incarnation) for each in every)

    @property
    def placed(self) -> list[AgentId]:
        """Return the nodes that workers have places on, also those that have not spoken yet."""
        return list(dict.fromkeys([*self._by_node, *self._beside]))

    @property
    def first_nodes(self) -> list[AgentId]:
        """Return the nodes that are the first ones of some workers."""
        return list(self._by_node)

    def unheard(self) -> list[AgentId]:
        """List nodes that have slots and have not spoken yet."""
        return [name for name in self.placed if name not in self.nodes]

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

    def ordered(self, status: WorkerStatus) -> bool:
        """Tell whether this very process should run; else its agent has been told to end it."""
        return self.wants(status.worker, status.incarnation)

    def wants(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Tell whether this incarnation is the one that should run."""
        slot = self.slots.get(worker)
        return slot is not None and slot.incarnation == incarnation and slot.respawn_at is None

    def dead(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Tell whether the agent has said that the process has ended, or its node is dismissed."""
        slot = self.slots.get(worker)
        if slot is None or slot.agent not in self.nodes:
            return slot is None
        return self._ended(self.newest.get(worker), incarnation)

    def crippled(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Tell whether processes of a spread member have ended on one of its further nodes.

        Then it can commit nothing any more.
        """
        slot = self.slots.get(worker)
        names = slot.further if slot is not None else ()
        heard = [self.nodes[name] for name in names if name in self.nodes]
        return any(self._ended(node.statuses.get(worker), incarnation) for node in heard)

    @staticmethod
    def _ended(status: WorkerStatus | None, incarnation: Incarnation) -> bool:
        if status is None or status.incarnation > incarnation:
            return True
        return status.incarnation == incarnation and not status.stage.alive

    def complete(self, status: WorkerStatus) -> bool:
        """Tell whether the processes of a worker run on all of its nodes, as these have told."""
        nodes = [self.nodes.get(name) for name in self.slots[status.worker].further]
        found = [node.statuses.get(status.worker) if node is not None else None for node in nodes]
        return all(
            s is not None and s.incarnation == status.incarnation and s.stage.alive for s in found
        )

    def failed(self) -> list[WorkerStatus]:
        """Return what is told of processes whose script has failed, on whichever node."""
        found = [status for status in self.newest.values() if status.stage == Stage.FAILED]
        for name, workers in self._beside.items():
            statuses = self.nodes[name].statuses if name in self.nodes else {}
            told = [statuses[worker] for worker in workers if worker in statuses]
            found += [status for status in told if status.stage == Stage.FAILED]
        return found

    def snapshot(self, silent: Collection[AgentId]) -> tuple[NodeSnapshot, ...]:
        return tuple(
            NodeSnapshot(
                agent=name,
                incarnation=node.incarnation,
                pid=node.pid,
                silent=name in silent,
                draining=node.draining,
                domains=node.domains,
                kept=node.kept,
                pieces_bytes=node.pieces_bytes,
            )
            for name, node in sorted(self.nodes.items())
        )

    def over(self, now: float, fence_s: float) -> bool:
        """Tell whether all that may run has ended; silent nodes end it by themselves.

        What a node has been told to start, and has not told of, may run until its agent knows.
        """
        if now < self.started_at + fence_s:
            if self.unheard():
                return False
        return all(
            node.ending and not any(status.stage.alive for status in node.statuses.values())
            for node in self.nodes.values()
            if now < node.heard_at + fence_s
        )

    def all_exited(self) -> bool:
        newest = self.newest
        everyone = 0 < len(newest) == len(self.slots)
        return everyone and all(s.stage == Stage.EXITED for s in newest.values())


_DECISIVE = attrgetter(
    *("incarnation", "stage", "view", "promised", "state", "at_boundary", "late", "ended"),
    *("loop", "unreached", "saved", "unreadable", "invalidations", "events", "detail"),
    *("address", "meets_at", "abreast", "unfed", "unrecalled"),
)


_RESTING = attrgetter("committed", "reduced", "waiting")
_MOVING = attrgetter("committed", "waiting", "activity")


def differs(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Tell whether something changed that is not mere progress within a view."""
    if _DECISIVE(old) != _DECISIVE(new):
        return True
    return new.has_stopped and _RESTING(old) != _RESTING(new)


def moved(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Tell whether this process has come further, or has begun or ended to wait for others."""
    same = old.incarnation == new.incarnation
    return same and _MOVING(old) != _MOVING(new)
