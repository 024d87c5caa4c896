"""Decides for groups of processes that torchrun scripts form. Pure.

Each function reads facts and what the coordinator knows of its group, and returns a plan: changes
for the machine to carry out before the next function is called (group.py has the order).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.membership.admission import Attendance
from holdfast.engine.core.membership.changes import (
    AddSlot,
    Change,
    DismissNode,
    OrderNext,
    PutSlot,
)
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.group_faults import GroupFault, Trials, find_fault, ranks_of
from holdfast.engine.core.membership.job_changes import (
    AwaitGroup,
    EndJob,
    GroupChange,
    InstallView,
    Memory,
    Remember,
)
from holdfast.engine.core.membership.restart import replace_lost
from holdfast.engine.core.membership.roster import Roster, SlotState
from holdfast.engine.core.policies import GroupPolicy, RestartPolicy
from holdfast.engine.core.types import NO_VIEW, AgentId, ProcessRole, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage

Plan = list[GroupChange]


@dataclass(slots=True, kw_only=True)
class GroupState:
    """Keeps what a coordinator knows of its groups, besides nodes and slots."""

    policy: GroupPolicy
    roster: Roster
    trials: Trials
    #: Since when this process has listened without a break.
    awake_since: float
    #: When the newest node came.
    came_at: float
    #: Since when there is no group.
    wanting_since: float
    attendance: Attendance = field(default_factory=Attendance)

    def remember(self, memory: Memory) -> None:
        """Keep a value that later decisions need; it replaces the one of the same type."""
        match memory:
            case Attendance():
                self.attendance = memory
            case Trials():
                self.trials = memory
            case _:
                raise AssertionError(f"a job of groups remembers no {memory}")

    def is_running(self, view: View | None) -> bool:
        """Return whether there is a group whose processes should all run."""
        return view is not None and all(
            self.roster.wants(m.worker, m.incarnation) for m in ranks_of(view)
        )

    def is_gone(self, facts: Facts) -> bool:
        """Return whether no process of the last group can act any more, or of one unknown to us."""
        ranks = ranks_of(facts.view) if facts.view is not None else ()
        dead, roster = self.roster.is_dead, self.roster
        heard = [node for name, node in roster.nodes.items() if not self.is_node_lost(name, facts)]
        known = [s for node in heard for s in node.statuses.values() if s.view != NO_VIEW]
        if any(s.stage.alive and not roster.is_ordered(s) for s in known):
            return False
        return all(
            dead(m.worker, m.incarnation) or self.is_node_lost(m.agent, facts) for m in ranks
        )

    def find_silent(self, now: float) -> frozenset[AgentId]:
        """Find the nodes that have not reported for a while."""
        lease, roster = self.policy.lease, self.roster
        names = [*roster.nodes, *roster.unheard_nodes()]
        return frozenset(n for n in names if now >= self.heard_at(n) + lease.suspect_s)

    def is_node_lost(self, name: AgentId, facts: Facts) -> bool:
        """Return whether a node's processes surely do not act any more, because its lease is over.

        Only a group that is all on one node continues there without a coordinator, for `abandon_s`.
        """
        lease, view = self.policy.lease, facts.view
        alone = view is not None and all(m.agent == name for m in view.members)
        limit_s = lease.abandon_s + lease.margin_s if alone else lease.fence_s
        return facts.now >= self.heard_at(name) + limit_s

    def heard_at(self, name: AgentId) -> float:
        """Return the time of a node's last report, or from which on this process has listened."""
        return max(self.roster.heard_at(name), self.awake_since)

    def still_since(self) -> float:
        """Return since when no process of the group has been seen at work."""
        return max(self.trials.still_since(self.roster.moved_at), self.awake_since)


# ---------------------------------------------------------------- nodes and their processes


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


# ---------------------------------------------------------------- decisions


def decide_admission(facts: Facts, group: GroupState) -> Plan:
    """Admit nodes, up to the largest number."""
    roster, policy, plan = facts.roster, group.policy, Plan()
    placed, waiting = len(roster.nodes_with_places), []
    for name, node in roster.nodes.items():
        if roster.workers_of(name) or name in facts.silent or node.report.draining:
            continue
        if policy.count_working(node.report.slots) < 1:
            continue
        if placed >= policy.nodes_max:
            waiting.append(name)
            continue
        placed += 1
        plan += admit_node(roster, name)
    attendance, lines = group.attendance.tell_waiting(tuple(waiting))
    return [*plan, Remember(attendance), *lines]


def decide_supervision(facts: Facts, group: GroupState) -> Plan:
    """End the group if it has done its work, a process of it failed, or nodes come or go."""
    view, roster, now = facts.view, facts.roster, facts.now
    if view is None or not group.is_running(facts.view):
        return []
    statuses = [facts.status(member) for member in ranks_of(view)]
    if all(status is not None and status.stage is Stage.EXITED for status in statuses):
        return [EndJob("")]
    lost = [name for name in roster.nodes_with_places if group.is_node_lost(name, facts)]
    fault, hang_s = find_fault(view, roster, lost), group.policy.hang_s
    if fault is None and now >= group.still_since() + hang_s:
        fault = GroupFault(f"no process has been at work for {hang_s:g} s: the group hangs")
    if fault is not None:
        return _restart(facts, group, fault)
    if why := _find_change(facts, view, group.policy):
        text = f"{why}: the group is restarted"
        return [*_end_group(facts), Announce("restart", text)]
    return []


def _find_change(facts: Facts, view: View, policy: GroupPolicy) -> str:
    """Return the reason to replace a sound group: a node is to leave, or can take part."""
    roster = facts.roster
    inside = list(dict.fromkeys(m.agent for m in ranks_of(view)))
    ready = [n for n in ready_nodes(roster, policy, facts.silent, view) if n not in inside]
    drained = [name for name in inside if roster.draining(name)]
    if drained and (ready or len(drained) < len(inside)):
        return f"node {drained[0]} is left: {roster.draining(drained[0])}"
    if ready and len(inside) < policy.nodes_max:
        return f"node {ready[0]} joins"
    return ""


def _restart(facts: Facts, group: GroupState, fault: GroupFault) -> Plan:
    """End the group because of a fault, and the job if that was once too often."""
    most, trials = group.policy.restarts_max, group.trials.count_fault(facts.now, group.policy)
    detail = f"\n{fault.detail}" if fault.detail else ""
    if trials.in_vain > most:
        times = f"{most} restarts without progress in between"
        why = f"{fault.headline}, after {times}; --restarts-max allows more{detail}"
        if not most:
            why = f"{fault.headline}; --restarts-max 0 allows no restart{detail}"
        return [Remember(trials), EndJob(why), Announce("failed", why)]
    wait_s = trials.next_at - facts.now
    after = f" in {wait_s:.3g} s" if wait_s > 0 else ""
    count = f"{trials.in_vain} of at most {most} without progress"
    text = f"{fault.headline}; the group is restarted{after} ({count}){detail}"
    return [Remember(trials), *_end_group(facts), Announce("restart", text)]


def _end_group(facts: Facts) -> Plan:
    """Order new processes in place of the group's; the store's stays if it lives."""
    view, roster, plan = facts.view, facts.roster, Plan()
    plan.append(AwaitGroup())
    for member in view.members if view is not None else ():
        alive = not roster.is_dead(member.worker, member.incarnation)
        serves = view is not None and member.worker == view.leader
        if member.worker in roster.slots and not (alive and serves):
            plan.append(OrderNext(member.worker))
    return plan


def decide_dismissals(facts: Facts, group: GroupState) -> Plan:
    """Take their slots from nodes that are lost, to make room for another node."""
    plan: Plan = []
    for name in facts.roster.nodes_with_places:
        if group.is_node_lost(name, facts):
            plan += [DismissNode(name), Announce("node", f"node {name} is lost")]
    return plan


def decide_group(facts: Facts, group: GroupState, number: ViewNumber) -> Plan:
    """Form the next group, with this number, once no process of the last one runs any more."""
    policy, roster, now = group.policy, facts.roster, facts.now
    if group.is_running(facts.view) or now < group.trials.next_at or not group.is_gone(facts):
        return []
    present = [
        n for n in roster.nodes_with_places if n not in facts.silent and not roster.draining(n)
    ]
    ready = ready_nodes(roster, policy, facts.silent, None)
    if len(ready) < policy.nodes_min:
        return []
    if len(ready) < len(present) and now < group.wanting_since + policy.late_s:
        return []
    if len(ready) < policy.nodes_max and now < group.came_at + policy.settle_s:
        return []
    ready = ready[: policy.nodes_max]  # more have slots if their record was lost
    view = form_view(roster, policy, ready, number, group.trials.restarts)
    count, names = len(view.owners), ", ".join(ready)
    text = f"group {number}: {count} processes on {names}"
    return [InstallView(view), Announce("view", text, None, number)]


def decide_on_lost(facts: Facts, group: GroupState) -> Plan:
    """Replace processes that are lost while they wait."""
    return [*replace_lost(facts, RestartPolicy())]


def decide_on_stillborn(facts: Facts, group: GroupState) -> Plan:
    """Give up if a process fails before it has a rank: the next one would as well."""
    view = facts.view
    for status in facts.roster.newest.values():
        if status.stage is not Stage.FAILED or not facts.roster.is_ordered(status):
            continue
        if status.view != NO_VIEW:
            continue  # its group was lost with the journal
        if view is None or not view.includes(status.worker, status.incarnation):
            why = f"no process can be started: {status.detail}"
            return [EndJob(why), Announce("failed", why, status.worker)]
    return []
