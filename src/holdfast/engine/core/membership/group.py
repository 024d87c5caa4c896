"""Decides for torchrun scripts, which do not use Holdfast: which processes form a group, and when.

A script written for torchrun wants a fixed group with ranks, and recovers by starting again from
its own checkpoint. So when one process of a group fails, all are ended. A new group is formed of
processes that wait for a rank with their libraries loaded. A group is a `View`: `owners[r]` runs
rank r, `leader` serves torch.distributed's store, `restarts` counts the faults.

It goes round the same loop as the coordinator of workers (decision_loop.py), is driven by the same
server, and directs the same agents. The invariants: group numbers grow and are durable before any
node knows them; a group is formed only once every process of the one before has ended, or its
node's lease has; an incarnation is never ordered twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import require
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.admission import welcome
from holdfast.engine.core.membership.changes import (
    AddSlot,
    Change,
    CountLoss,
    DismissNode,
    OrderNext,
    PutSlot,
)
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorSnapshot,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.decision_loop import SKIPPED, DecisionLoop
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.group_faults import GroupFault, Trials, find_fault, ranks_of
from holdfast.engine.core.membership.job_changes import (
    AwaitGroup,
    EndJob,
    EndLearning,
    GroupChange,
    InstallView,
    Remember,
)
from holdfast.engine.core.membership.live_roster import News
from holdfast.engine.core.membership.restart import replace_lost
from holdfast.engine.core.membership.roster import Roster, SlotState
from holdfast.engine.core.policies import GroupPolicy, RestartPolicy
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


Plan = list[GroupChange]


class GroupMachine(DecisionLoop[GroupChange]):
    """Decides for the job, as the module describes; `handle` is the only mutator."""

    def __init__(
        self,
        policy: GroupPolicy,
        term: int,
        record: JobRecord | None,
        now: float,
        forgotten: int = 0,
    ) -> None:
        super().__init__(policy.lease, term, record, now, forgotten)
        self._policy = policy
        self._learn_until = now + policy.lease.abandon_s if forgotten else None
        self._trials = Trials(
            restarts=self._view.restarts if self._view else 0,
            began_at=now,
            next_at=now,
            stepped_at=now,
        )
        self._awake_since = now
        self._came_at = now  # when the newest node came
        self._wanting_since = now  # since when there is no group
        self._deadline: float | None = now
        self._changed = True

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        return self._deadline

    def snapshot(self) -> CoordinatorSnapshot:
        return self._snapshot(
            self._trials.furthest, NO_VIEW if self._is_running() else self._number
        )

    def check(self) -> None:
        view = self._view
        if view is not None:
            workers = view.workers
            require(list(workers) == sorted(set(workers)), "members are not in order")
            require(len(set(view.owners)) == len(view.owners), "a process has two ranks")
            ranks = {*view.owners, view.leader}
            require(ranks == set(workers) and view.leader not in view.owners, "ranks do not fit")
            require(view.number <= self._views_used, "a group's number was never used")
        super().check()

    # ------------------------------------------------------------ facts

    def _wake(self, now: float) -> None:
        if self._deadline is not None and now > self._deadline + self._lease.suspect_s / 2:
            self._awake_since = now  # this process stood still and received no report

    def _hear(self, report: AgentReport, now: float) -> bool:
        roster = self._roster
        before = report.agent in self._find_silent(now)
        news = roster.hear(report, now)
        if news is News.STALE:
            return False
        if self._learn_until is not None:
            self._recall(report)
            self._views_used = ViewNumber(max(self._views_used, report.view_known + SKIPPED))
            if report.view is not None and _is_surely_newest(report.view, report):
                fenced = roster.started_at + self._lease.fence_s
                self._learn_until = min(self._learn_until, fenced)
        view = self._view
        for status in report.workers:
            if view is not None and view.includes(status.worker, status.incarnation):
                self._trials = self._trials.reach(status.committed, now)
        if news is News.CHANGE or before:
            self._changed = True
        return True

    def _obey(self, order: StopRequested | ServersAsked, now: float) -> list[Announce]:
        assert isinstance(order, StopRequested), "a group has no servers of tables"
        self._outcome, self._changed = order.reason, True
        self._end_signal = order.signal
        return [Announce("stop", order.reason)]

    def _facts(self, now: float) -> Facts:
        return Facts(
            view=self._view,
            roster=self._roster,
            lease=self._lease,
            silent=self._find_silent(now),
            witness_at=now,
            now=now,
        )

    # ------------------------------------------------------------ plan

    def _is_due(self, now: float) -> bool:
        return self._changed or (self._deadline is not None and now >= self._deadline)

    def _end_review(self, now: float) -> None:
        self._deadline = min((t for t in self._alarms() if t > now), default=None)

    def _alarms(self) -> Iterator[float]:
        """Yield when time alone changes a decision, as far as one knows now."""
        lease, roster, policy = self._policy.lease, self._roster, self._policy
        for name in [*roster.nodes, *roster.unheard_nodes()]:
            heard_at = max(roster.heard_at(name), self._awake_since)
            yield heard_at + lease.suspect_s
            yield heard_at + lease.fence_s
            yield heard_at + lease.abandon_s + lease.margin_s
        yield from (s.respawn_at for s in roster.slots.values() if s.respawn_at is not None)
        if self._learn_until is not None:
            yield self._learn_until
        if self._is_running():
            yield self._still_since() + policy.hang_s
        else:
            yield self._trials.next_at
            yield self._came_at + policy.settle_s
            yield self._wanting_since + policy.late_s

    def _decide(self, now: float) -> list[CoordinatorEffect]:
        self._changed = False
        self._apply(self._plan_to_learn(self._facts(now)), now)
        if self._learn_until is not None:
            return []
        self._apply(welcome(self._facts(now), recall=False), now)
        lines: list[CoordinatorEffect] = []
        for decide in (
            self._plan_admission,
            self._plan_silence,
            self._plan_drains,
            self._plan_supervision,
            self._plan_dismissals,
            self._plan_group,
            self._plan_for_lost,
            self._plan_for_stillborn,
        ):
            if self._outcome is None:
                lines += self._apply(decide(self._facts(now)), now)
        return lines

    def _plan_to_learn(self, facts: Facts) -> Plan:
        """Begin to decide once no process of a lost record can run any more."""
        if self._learn_until is None or facts.now < self._learn_until:
            return []
        return [EndLearning(), *restore_slots(facts.roster)]

    def _plan_admission(self, facts: Facts) -> Plan:
        """Admit nodes, up to the largest number."""
        roster, policy, plan = facts.roster, self._policy, Plan()
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
        attendance, lines = self._attendance.tell_waiting(tuple(waiting))
        return [*plan, Remember(attendance), *lines]

    def _plan_supervision(self, facts: Facts) -> Plan:
        """End the group if it has done its work, a process of it failed, or nodes come or go."""
        view, roster, now = facts.view, facts.roster, facts.now
        if view is None or not self._is_running():
            return []
        statuses = [facts.status(member) for member in ranks_of(view)]
        if all(status is not None and status.stage is Stage.EXITED for status in statuses):
            return [EndJob("")]
        lost = [name for name in roster.nodes_with_places if self._is_node_lost(name, now)]
        fault, hang_s = find_fault(view, roster, lost), self._policy.hang_s
        if fault is None and now >= self._still_since() + hang_s:
            fault = GroupFault(f"no process has been at work for {hang_s:g} s: the group hangs")
        if fault is not None:
            return self._restart(facts, fault)
        if why := self._reason_to_change(facts, view):
            text = f"{why}: the group is restarted"
            return [*self._end_group(facts), Announce("restart", text)]
        return []

    def _reason_to_change(self, facts: Facts, view: View) -> str:
        """Return the reason to replace a sound group: a node is to leave, or can take part."""
        roster, policy = facts.roster, self._policy
        inside = list(dict.fromkeys(m.agent for m in ranks_of(view)))
        ready = [n for n in ready_nodes(roster, policy, facts.silent, view) if n not in inside]
        drained = [name for name in inside if roster.draining(name)]
        if drained and (ready or len(drained) < len(inside)):
            return f"node {drained[0]} is left: {roster.draining(drained[0])}"
        if ready and len(inside) < policy.nodes_max:
            return f"node {ready[0]} joins"
        return ""

    def _restart(self, facts: Facts, fault: GroupFault) -> Plan:
        """End the group because of a fault, and the job if that was once too often."""
        most, trials = self._policy.restarts_max, self._trials.count_fault(facts.now, self._policy)
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
        return [Remember(trials), *self._end_group(facts), Announce("restart", text)]

    def _end_group(self, facts: Facts) -> Plan:
        """Order new processes in place of the group's; the store's stays if it lives."""
        view, roster, plan = facts.view, facts.roster, Plan()
        plan.append(AwaitGroup())
        for member in view.members if view is not None else ():
            alive = not roster.is_dead(member.worker, member.incarnation)
            serves = view is not None and member.worker == view.leader
            if member.worker in roster.slots and not (alive and serves):
                plan.append(OrderNext(member.worker))
        return plan

    def _plan_dismissals(self, facts: Facts) -> Plan:
        """Take their slots from nodes that are lost, to make room for another node."""
        plan: Plan = []
        for name in facts.roster.nodes_with_places:
            if self._is_node_lost(name, facts.now):
                plan += [DismissNode(name), Announce("node", f"node {name} is lost")]
        return plan

    def _plan_group(self, facts: Facts) -> Plan:
        """Form the next group, once no process of the last one runs any more."""
        policy, roster, now = self._policy, facts.roster, facts.now
        if self._is_running() or now < self._trials.next_at or not self._is_gone(now):
            return []
        present = [
            n for n in roster.nodes_with_places if n not in facts.silent and not roster.draining(n)
        ]
        ready = ready_nodes(roster, policy, facts.silent, None)
        if len(ready) < policy.nodes_min:
            return []
        if len(ready) < len(present) and now < self._wanting_since + policy.late_s:
            return []
        if len(ready) < policy.nodes_max and now < self._came_at + policy.settle_s:
            return []
        ready = ready[: policy.nodes_max]  # more have slots if their record was lost
        view = form_view(roster, policy, ready, self._next_number, self._trials.restarts)
        count, names, number = len(view.owners), ", ".join(ready), view.number
        text = f"group {number}: {count} processes on {names}"
        return [InstallView(view), Announce("view", text, None, number)]

    def _plan_for_lost(self, facts: Facts) -> Plan:
        return [*replace_lost(facts, RestartPolicy())]

    def _plan_for_stillborn(self, facts: Facts) -> Plan:
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

    # ------------------------------------------------------------ apply

    def _carry_out(self, change: GroupChange, now: float) -> Sequence[Announce]:
        match change:
            case Announce():
                return [change]
            case CountLoss(worker, reason, _):
                return [Announce("lost", f"waiting process {worker} was lost: {reason}", worker)]
            case EndLearning():
                self._learn_until = None
            case EndJob(outcome):
                self._outcome = outcome
            case Remember(Trials() as trials):
                self._trials = trials
            case Remember(memory):
                self._remember(memory)
            case AwaitGroup():
                self._wanting_since = now
            case InstallView(view):
                self._view, self._views_used = view, view.number
                self._trials = self._trials.begin(now)
            case _:
                if isinstance(change, AddSlot):
                    self._came_at = now
                self._roster.apply(change)
        return []

    # ------------------------------------------------------------ knowing

    def _is_running(self) -> bool:
        """Return whether there is a group whose processes should all run."""
        view = self._view
        return view is not None and all(
            self._roster.wants(m.worker, m.incarnation) for m in ranks_of(view)
        )

    def _is_gone(self, now: float) -> bool:
        """Return whether no process of the last group can act any more, or of one unknown to us."""
        ranks = ranks_of(self._view) if self._view is not None else ()
        dead, roster = self._roster.is_dead, self._roster
        heard = [node for name, node in roster.nodes.items() if not self._is_node_lost(name, now)]
        told = [s for node in heard for s in node.statuses.values() if s.view != NO_VIEW]
        if any(s.stage.alive and not roster.is_ordered(s) for s in told):
            return False
        return all(dead(m.worker, m.incarnation) or self._is_node_lost(m.agent, now) for m in ranks)

    def _find_silent(self, now: float) -> frozenset[AgentId]:
        lease, roster = self._policy.lease, self._roster
        names = [*roster.nodes, *roster.unheard_nodes()]
        return frozenset(n for n in names if now >= self._heard_at(n) + lease.suspect_s)

    def _is_node_lost(self, name: AgentId, now: float) -> bool:
        """Return whether a node's processes surely do not act any more, because its lease is over.

        Only a group that is all on one node continues there without a coordinator, for `abandon_s`.
        """
        lease, view = self._policy.lease, self._view
        alone = view is not None and all(m.agent == name for m in view.members)
        limit_s = lease.abandon_s + lease.margin_s if alone else lease.fence_s
        return now >= self._heard_at(name) + limit_s

    def _heard_at(self, name: AgentId) -> float:
        return max(self._roster.heard_at(name), self._awake_since)

    def _still_since(self) -> float:
        """Return since when no process of the group has been seen at work."""
        return max(self._trials.still_since(self._roster.moved_at), self._awake_since)


def _is_surely_newest(view: View, report: AgentReport) -> bool:
    """Return whether no later group can have been formed, as far as one agent knows.

    A group that is all on one node acts there until another group is formed. A group on several
    nodes may have been given up, for a group on a node that is silent now.
    """
    alive = [(s.worker, s.incarnation) for s in report.workers if s.stage.alive]
    return all((m.worker, m.incarnation) in alive for m in view.members)
