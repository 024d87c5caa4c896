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
from collections.abc import Iterator, Sequence

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import require
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import group_decisions as decisions
from holdfast.engine.core.membership.admission import recall_slots, welcome
from holdfast.engine.core.membership.changes import AddSlot, CountLoss
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorSnapshot,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.decision_loop import SKIPPED, DecisionLoop
from holdfast.engine.core.membership.decisions import decide_drains, decide_silence
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.group_decisions import GroupState, Plan, restore_slots
from holdfast.engine.core.membership.group_faults import Trials
from holdfast.engine.core.membership.job_changes import (
    AwaitGroup,
    EndJob,
    EndLearning,
    GroupChange,
    InstallView,
    Remember,
)
from holdfast.engine.core.membership.live_roster import News
from holdfast.engine.core.membership.roster import describe_nodes
from holdfast.engine.core.policies import GroupPolicy
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.core.views import View


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
        self._learn_until = now + policy.lease.abandon_s if forgotten else None
        trials = Trials(
            restarts=self._view.restarts if self._view else 0,
            began_at=now,
            next_at=now,
            stepped_at=now,
        )
        self._group = GroupState(
            policy=policy,
            roster=self._roster,
            trials=trials,
            awake_since=now,
            came_at=now,
            wanting_since=now,
        )
        self._deadline: float | None = now
        self._changed = True

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        return self._deadline

    def snapshot(self) -> CoordinatorSnapshot:
        """Return the state of the job for people."""
        group = self._group
        return dataclasses.replace(
            super().snapshot(),
            step=group.trials.furthest,
            stop_view=NO_VIEW if group.is_running(self._view) else self._number,
            agents=describe_nodes(self._roster, group.attendance.silent),
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

    def _hear(self, report: AgentReport, now: float) -> bool:
        roster, group = self._roster, self._group
        before = report.agent in group.find_silent(now)
        news = roster.hear(report, now)
        if news is News.STALE:
            return False
        if self._learn_until is not None:
            self._apply(recall_slots(roster, report.agent, report.workers, report.view), now)
            self._views_used = ViewNumber(max(self._views_used, report.view_known + SKIPPED))
            if report.view is not None and _is_surely_newest(report.view, report):
                fenced = roster.started_at + self._lease.fence_s
                self._learn_until = min(self._learn_until, fenced)
        view = self._view
        for status in report.workers:
            if view is not None and view.includes(status.worker, status.incarnation):
                group.trials = group.trials.reach(status.committed, now)
        if news is News.CHANGE or before:
            self._changed = True
        return True

    def _obey(self, order: StopRequested | ServersAsked, now: float) -> list[Announce]:
        assert isinstance(order, StopRequested), "a group has no hosted service"
        self._outcome, self._changed = order.reason, True
        self._end_signal = order.signal
        return [Announce("stop", order.reason)]

    def _facts(self, now: float) -> Facts:
        return Facts(
            view=self._view,
            roster=self._roster,
            lease=self._lease,
            silent=self._group.find_silent(now),
            witness_at=now,
            now=now,
        )

    # ------------------------------------------------------------ plan and apply

    def _is_due(self, now: float) -> bool:
        if self._deadline is not None and now > self._deadline + self._lease.suspect_s / 2:
            self._group.awake_since = now  # this process stood still and received no report
        return self._changed or (self._deadline is not None and now >= self._deadline)

    def _end_review(self, now: float) -> None:
        self._deadline = min((t for t in self._alarms() if t > now), default=None)

    def _alarms(self) -> Iterator[float]:
        """Yield when time alone changes a decision, as far as one knows now."""
        lease, roster, group = self._lease, self._roster, self._group
        for name in [*roster.nodes, *roster.unheard_nodes()]:
            heard_at = group.heard_at(name)
            yield heard_at + lease.suspect_s
            yield heard_at + lease.fence_s
            yield heard_at + lease.abandon_s + lease.margin_s
        yield from (s.respawn_at for s in roster.slots.values() if s.respawn_at is not None)
        if self._learn_until is not None:
            yield self._learn_until
        if group.is_running(self._view):
            yield group.still_since() + group.policy.hang_s
        else:
            yield group.trials.next_at
            yield group.came_at + group.policy.settle_s
            yield group.wanting_since + group.policy.late_s

    def _decide(self, now: float) -> list[CoordinatorEffect]:
        self._changed = False
        if self._learn_until is not None and now >= self._learn_until:
            # No process of a lost record can run any more.
            self._apply([EndLearning(), *restore_slots(self._roster)], now)
        if self._learn_until is not None:
            return []
        self._apply(welcome(self._facts(now), recall=False), now)
        lines: list[CoordinatorEffect] = []
        for decide in (
            decisions.decide_admission,
            decide_silence,
            decide_drains,
            decisions.decide_supervision,
            decisions.decide_dismissals,
            self._decide_group,
            decisions.decide_on_lost,
            decisions.decide_on_stillborn,
        ):
            if self._outcome is None:
                lines += self._apply(decide(self._facts(now), self._group), now)
        return lines

    def _decide_group(self, facts: Facts, group: GroupState) -> Plan:
        return decisions.decide_group(facts, group, self._next_number)

    def _carry_out(self, change: GroupChange, now: float) -> Sequence[Announce]:
        group = self._group
        match change:
            case Announce():
                return [change]
            case CountLoss(worker, reason, _):
                return [Announce("lost", f"waiting process {worker} was lost: {reason}", worker)]
            case EndLearning():
                self._learn_until = None
            case EndJob(outcome):
                self._outcome = outcome
            case Remember(memory):
                group.remember(memory)
            case AwaitGroup():
                group.wanting_since = now
            case InstallView(view):
                self._view, self._views_used = view, view.number
                group.trials = group.trials.begin(now)
            case _:
                if isinstance(change, AddSlot):
                    group.came_at = now
                self._roster.apply(change)
        return []


def _is_surely_newest(view: View, report: AgentReport) -> bool:
    """Return whether no later group can have been formed, as far as one agent knows.

    A group that is all on one node acts there until another group is formed. A group on several
    nodes may have been given up, for a group on a node that is silent now.
    """
    alive = [(s.worker, s.incarnation) for s in report.workers if s.stage.alive]
    return all((m.worker, m.incarnation) in alive for m in view.members)
