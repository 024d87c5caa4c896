"""Finds places for a group of processes: which nodes are ready, and which process has which rank.

On every node one slot is for the process that can serve the group's store; the others are for
processes that wait until they are told a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from holdfast.engine.core.job_spec import GroupPolicy
from holdfast.engine.core.membership.changes import AddSlot, Change, OrderNext, PutSlot
from holdfast.engine.core.membership.roster import Roster, SlotState
from holdfast.engine.core.types import NO_VIEW, AgentId, ProcessRole, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage


def admit_node(roster: Roster, name: AgentId) -> list[Change]:
    """Give a node the slots that it offers: the first one for a store."""
    roles = [ProcessRole.STORE, *[ProcessRole.WORKER] * (roster.nodes[name].report.slots - 1)]
    return [AddSlot(SlotState(name, roster.first, role=role)) for role in roles]


def restore_slots(roster: Roster) -> list[Change]:
    """Replace all processes after the record was lost; one on every node serves as a store."""
    plan: list[Change] = []
    for name in roster.nodes_with_places:
        slots = [(worker, roster.slots[worker]) for worker in roster.workers_of(name)]
        if all(slot.role is ProcessRole.WORKER for _, slot in slots):
            worker, slot = slots[0]
            plan.append(PutSlot(worker, dataclasses.replace(slot, role=ProcessRole.STORE)))
    return [*plan, *(OrderNext(worker) for worker in roster.slots)]


def find_waiting(roster: Roster, name: AgentId, role: ProcessRole) -> list[WorkerId]:
    """Find a node's processes in a role that wait for a rank, or may serve a group's store."""
    found = []
    for worker in roster.workers_of(name):
        status = roster.status(worker)
        if roster.slots[worker].role is not role or status is None or not roster.is_ordered(status):
            continue
        free = status.view == NO_VIEW or role is ProcessRole.STORE
        if status.stage is Stage.READY and free:
            found.append(worker)
    return sorted(found)


def ready_nodes(
    roster: Roster, policy: GroupPolicy, silent: Collection[AgentId], view: View | None
) -> list[AgentId]:
    """Find nodes where enough processes wait to be given a rank; members of `view` do not."""
    found = []
    for name in roster.nodes_with_places:
        if name in silent or roster.draining(name) or name not in roster.nodes:
            continue
        waiting = find_waiting(roster, name, ProcessRole.WORKER)
        if view is not None:
            waiting = [w for w in waiting if view.member(w) is None]
        enough = len(waiting) >= policy.count_working(roster.nodes[name].report.slots)
        if enough and find_waiting(roster, name, ProcessRole.STORE):
            found.append(name)
    return found


def form_view(
    roster: Roster, policy: GroupPolicy, nodes: Sequence[AgentId], number: ViewNumber, restarts: int
) -> View:
    """Form a group of waiting processes on these nodes; the first node serves the store."""
    owners: list[WorkerId] = []
    for name in nodes:
        count = policy.count_working(roster.nodes[name].report.slots)
        owners += find_waiting(roster, name, ProcessRole.WORKER)[:count]
    leader = find_waiting(roster, nodes[0], ProcessRole.STORE)[0]
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
