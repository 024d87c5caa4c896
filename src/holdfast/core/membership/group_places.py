"""Finds places for a group of processes: which nodes are ready, and which process has which rank.

On every node one slot is for the process that can serve the group's store; the others are for
processes that wait until they are told a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.core.job_spec import GroupPolicy
from holdfast.core.membership.roster import Roster, SlotState
from holdfast.core.types import (
    NO_VIEW,
    AgentId,
    Member,
    ProcessRole,
    Stage,
    View,
    ViewNumber,
    WorkerId,
)


def admit_node(roster: Roster, name: AgentId) -> None:
    """Give a node the slots that it offers: the first one for a store."""
    for index in range(roster.nodes[name].offered):
        role = ProcessRole.WORKER if index else ProcessRole.STORE
        slot = SlotState(name, roster.first, role=role)
        roster.add_slot(WorkerId(roster.workers_named), slot)


def restore_roles(roster: Roster) -> None:
    """Give every node a slot for a store again, where the record of the slots was lost."""
    for name in roster.placed:
        slots = [roster.slots[worker] for worker in roster.here(name)]
        if all(slot.role is ProcessRole.WORKER for slot in slots):
            slots[0].role = ProcessRole.STORE


def waiting_here(roster: Roster, name: AgentId, role: ProcessRole) -> list[WorkerId]:
    """Find a node's processes in a role that wait for a rank, or may serve a group's store."""
    found = []
    for worker in roster.here(name):
        status = roster.status(worker)
        if roster.slots[worker].role is not role or status is None or not roster.ordered(status):
            continue
        free = status.view == NO_VIEW or role is ProcessRole.STORE
        if status.stage is Stage.READY and free:
            found.append(worker)
    return sorted(found)


def ready_nodes(
    roster: Roster, policy: GroupPolicy, silent: Collection[AgentId], view: View | None
) -> list[AgentId]:
    """Find nodes with as many waiting processes as should work there; members of `view` do not."""
    found = []
    for name in roster.placed:
        if name in silent or roster.draining(name) or name not in roster.nodes:
            continue
        waiting = waiting_here(roster, name, ProcessRole.WORKER)
        if view is not None:
            waiting = [w for w in waiting if view.member(w) is None]
        enough = len(waiting) >= policy.working(roster.nodes[name].offered)
        if enough and waiting_here(roster, name, ProcessRole.STORE):
            found.append(name)
    return found


def form_view(
    roster: Roster, policy: GroupPolicy, nodes: Sequence[AgentId], number: ViewNumber, restarts: int
) -> View:
    """Form a group of waiting processes on these nodes; the first node serves the store."""
    owners: list[WorkerId] = []
    for name in nodes:
        count = policy.working(roster.nodes[name].offered)
        owners += waiting_here(roster, name, ProcessRole.WORKER)[:count]
    leader = waiting_here(roster, nodes[0], ProcessRole.STORE)[0]
    members = [
        Member(worker=w, incarnation=roster.slots[w].incarnation, agent=roster.slots[w].agent)
        for w in sorted([*owners, leader])
    ]
    return View(
        number=number,
        members=tuple(members),
        owners=tuple(owners),
        resume_step=0,
        leader=leader,
        restarts=restarts,
    )
