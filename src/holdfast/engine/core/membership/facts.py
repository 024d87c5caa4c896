"""Describes the facts that decisions are made from. They do not change while one is made.

Every decision of a coordinator is a function of `Facts` (and of the job's policy) that returns a
plan (changes.py). Almost all of them ask what silence proves, so the answers are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.engine.core.membership.lease import fence_time
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.view_making import NO_LIMIT, Room
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import Follower, Member, View
from holdfast.engine.core.worker_status import WorkerStatus

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Describes the present view, the state of its members, and the proofs that silence gives.

    `silent`: nodes without a report for a while. `witness_at`: when the first report showed that
    some member of the view has stopped acting in it. `caught_up`: followers that have caught up.
    `waiting_for`: workers that are fed, or will be, so that they do not join in a pause. `now`:
    seconds. `held_back`: suspended workers for which the view is not changed yet.
    """

    view: View | None
    roster: Roster
    lease: LeasePolicy
    silent: frozenset[AgentId]
    witness_at: float | None
    now: float
    caught_up: tuple[Follower, ...] = ()
    waiting_for: frozenset[WorkerId] = frozenset()
    #: A worker is being fed.
    feeding: bool = False
    room: Room = NO_LIMIT
    held_back: frozenset[WorkerId] = frozenset()
    _found: dict[tuple[Callable[[Facts], Any], int], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def find_once(self, find: Callable[[Facts], T]) -> T:
        """Return the value of `find`, computed once for these facts: large jobs have many members.

        All callers share the value, so none may change it. A change of the roster makes it void.
        """
        key = (find, self.roster.version)
        if key not in self._found:
            self._found[key] = find(self)
        found: T = self._found[key]
        return found

    @property
    def members(self) -> tuple[Member, ...]:
        return self.view.members if self.view else ()

    @property
    def known(self) -> list[WorkerStatus]:
        """Return the newest statuses of the members that have reported."""
        found = [self.status(member) for member in self.members]
        return [status for status in found if status is not None]

    def has_no_room(self) -> bool:
        """Return whether a member rests because its ledger cannot grow."""
        return self.find_once(_find_no_room)

    def status(self, member: Member) -> WorkerStatus | None:
        return self.roster.status(member.worker, member.incarnation)

    def is_sound(self, member: Member) -> bool:
        """Return whether this process has reported lately, and lives."""
        status = self.status(member)
        alive = status is not None and status.stage.alive
        crippled = self.roster.is_crippled(member.worker, member.incarnation)
        return alive and self.find_silent_node(member) is None and not crippled

    def list_places(self) -> dict[WorkerId, AgentId]:
        """Return the node of each worker that may run, now or after it has waited.

        A node that was given up, silent for too long, runs none.
        """
        slots, drained = self.roster.slots.items(), self.roster.drained_node
        return {
            worker: slot.agent
            for worker, slot in slots
            if not drained(worker) and not any(is_given_up(self, name) for name in slot.nodes)
        }

    def is_moving(self) -> bool:
        """Return whether a member acts in the view, or the job has come further not long ago."""
        known = (self.status(member) for member in self.members if self.is_sound(member))
        acts = any(status is not None and not status.has_stopped for status in known)
        return acts or self.now < self.roster.moved_at + self.lease.abandon_s

    def has_unfinished(self) -> bool:
        """Return whether a member has the last gradient but not its votes: a view commits it."""
        left = [self.status(member) for member in self.members if not self.is_fenced(member)]
        return any(status is not None and not status.ended for status in left)

    def find_silent_node(self, member: Member) -> AgentId | None:
        """Return one of its nodes that is silent, if there is one."""
        silent = self.silent
        return next((name for name in member.nodes if name in silent), None) if silent else None

    def is_fenced(self, member: Member) -> bool:
        """Return whether this process can never act in the view again: dead, or without lease."""
        if self.is_sound(member):
            return False
        if self._is_dead(member):
            return True
        heard_at = self.roster.heard_at(member.agent)
        return member.agent in self.silent and self.now >= fence_time(
            heard_at, self.witness_at, self.lease, leave_time(self.roster, member.agent)
        )

    def can_return(self, member: Member) -> bool:
        return member.agent in self.silent and not self.is_abandoned(member)

    def can_hold(self, member: Member) -> bool:
        """Return whether a silent node may still hold the state, or keep pieces of it."""
        if not member.further:
            return self.can_return(member)
        return any(n in self.silent and not is_given_up(self, n) for n in member.nodes)

    def is_abandoned(self, member: Member) -> bool:
        """Return whether the state that this process may hold is given up as well."""
        return self._is_dead(member) or is_given_up(self, member.agent)

    def _is_dead(self, member: Member) -> bool:
        roster, worker, incarnation = self.roster, member.worker, member.incarnation
        if roster.is_dead(worker, incarnation):
            return True
        fenced_at = roster.heard_at(member.agent) + self.lease.fence_s
        silent = member.agent in self.silent and self.now >= fenced_at
        return silent and roster.is_crippled(worker, incarnation)


def has_witness(roster: Roster, view: View | None, agent: AgentId) -> bool:
    """Return whether a worker on this node shows that some member does not act in the view."""
    for worker in roster.workers_on(agent):
        member = view.member(worker) if view is not None else None
        if view is not None and member is not None:
            status = roster.status(worker, member.incarnation)
            has_promised = status is not None and status.promised >= view.number
            if has_promised or roster.is_dead(worker, member.incarnation):
                return True
    return False


def _find_no_room(facts: Facts) -> bool:
    return any(status.no_room for status in facts.known)


class LatestFacts:
    """Keeps the facts of the last decision with their findings, for the next decision."""

    def __init__(self) -> None:
        self._made_from: tuple[Facts, object] | None = None
        self._facts: Facts

    def update(self, plain: Facts, sources: object, complete: Callable[[Facts], Facts]) -> Facts:
        """Return `plain` as `complete` returns it, or the last facts if they are the same.

        `sources`: the other values that decide the facts, with the version of the roster.
        """
        if self._made_from != (plain, sources):
            self._made_from, self._facts = (plain, sources), complete(plain)
        return self._facts


def is_given_up(facts: Facts, agent: AgentId) -> bool:
    """Return whether a node has been silent for too long to be waited for, or is taken away."""
    heard_at, ends_at = facts.roster.heard_at(agent), leave_time(facts.roster, agent)
    return facts.now >= fence_time(heard_at, None, facts.lease, ends_at)


def leave_time(roster: Roster, agent: AgentId) -> float:
    """Return the announced time at which a node is taken away; infinite if there is none."""
    node = roster.nodes.get(agent)
    return node.leave_by if node is not None else float("inf")


def silent_nodes(
    roster: Roster, lease: LeasePolicy, now: float, listening_since: float
) -> frozenset[AgentId]:
    """Find the silent nodes; a node that has never reported yet is given a whole lease."""
    if now < listening_since + lease.suspect_s:
        return frozenset()
    nodes = roster.nodes.items()
    silent = [name for name, node in nodes if now >= node.heard_at + lease.suspect_s]
    if now >= max(roster.started_at, listening_since) + lease.fence_s:
        silent += roster.unheard_nodes()
    return frozenset(silent)
