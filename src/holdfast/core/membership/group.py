"""Decides for a job of processes that know nothing of Holdfast: who is in the group, and when anew.

A script written for torchrun wants a fixed group with ranks, and recovers by starting again from
its own checkpoint. So when one process of a group fails, all are ended, and a new group is formed
of processes that wait, with their libraries loaded, to be told a rank. A group is a `View`:
`owners[r]` runs rank r, `leader` serves torch.distributed's store, `restarts` counts the faults.

It is driven as the coordinator machine is, by the same server, and speaks with the same agents.
The invariants: group numbers grow and are durable before anyone hears of them; a group is formed
only once every process of the one before has ended, or its node's lease has; an incarnation is
never ordered twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.errors import assert_never, require
from holdfast.core.job_spec import GroupPolicy
from holdfast.core.membership.admission import Attendance, attend, choose_drained
from holdfast.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSnapshot,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
    StopRequested,
)
from holdfast.core.membership.formation import Situation
from holdfast.core.membership.group_faults import GroupFault, Trials, find_fault, ranks_of
from holdfast.core.membership.group_places import (
    admit_node,
    form_view,
    ready_nodes,
    restore_roles,
)
from holdfast.core.membership.restart import RestartPolicy, replace_lost
from holdfast.core.membership.roster import News, Roster
from holdfast.core.types import (
    NO_VIEW,
    AgentId,
    AgentReport,
    Directive,
    Incarnation,
    JobRecord,
    Stage,
    Tick,
    View,
    ViewNumber,
    WantedProcess,
)

SKIPPED = 1000  # numbers passed over after the loss of the journal


class GroupMachine:
    """Decides for the job, as the module describes; `handle` is the only mutator."""

    def __init__(
        self,
        policy: GroupPolicy,
        term: int,
        record: JobRecord | None,
        now: float,
        forgotten: int = 0,
    ) -> None:
        self._policy = policy
        self._term = term
        self._view = record.view if record else None
        self._forgotten = record.forgotten if record else forgotten
        passed_over = self._forgotten * SKIPPED
        self._views_used = record.views_used if record else ViewNumber(passed_over)
        self._outcome = record.outcome if record else None
        self._roster = Roster(record, now, Incarnation(passed_over + 1))
        self._learn_until = now + policy.lease.abandon_s if forgotten else None
        self._persisted = record
        self._trials = Trials(now, self._view.restarts if self._view else 0)
        self._attendance = Attendance()
        self._awake_since = now
        self._came_at = now  # when the newest node came
        self._wanting_since = now  # since when there is no group
        self._deadline: float | None = now
        self._changed = True
        self._seq = 0
        self._finished = False

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event at time `now` (seconds); return effects in order."""
        effects: list[CoordinatorEffect] = []
        reply_to: AgentId | None = None
        if self._deadline is not None and now > self._deadline + self._policy.lease.suspect_s / 2:
            self._awake_since = now  # this process stood still and heard nobody
        match event:
            case ReportArrived(report):
                if self._hear(report, now):
                    reply_to = report.agent
            case StopRequested(reason, _):
                if self._outcome is None:
                    self._outcome, self._changed = reason, True
                    effects.append(Announce("stop", reason))
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._changed or (self._deadline is not None and now >= self._deadline):
            return [*effects, *self._review(reply_to, now)]
        return [*effects, self._answer(reply_to)] if reply_to is not None else effects

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        return self._deadline

    @property
    def view(self) -> View | None:
        return self._view

    @property
    def outcome(self) -> str | None:
        """Return how the job ends or ended: None while it runs, empty for success."""
        return self._outcome

    def snapshot(self) -> CoordinatorSnapshot:
        number = self._number
        return CoordinatorSnapshot(
            record=self._record(),
            step=self._trials.furthest,
            stop_view=NO_VIEW if self._running() else number,
            pending_view=NO_VIEW,
            agents=self._roster.snapshot(self._attendance.silent),
            workers=tuple(s for _, s in sorted(self._roster.newest.items())),
            finished=self._finished,
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
        saved = self._persisted in (None, self._record())
        require(saved or self._learn_until is not None, "unsaved record")

    # ------------------------------------------------------------ hearing

    def _hear(self, report: AgentReport, now: float) -> bool:
        """Take in a report; return whether to answer it."""
        roster = self._roster
        before = report.agent in self._silent(now)
        news = roster.hear(report, now)
        if news is News.STALE:
            return False
        if self._learn_until is not None:
            roster.recall(report.agent, report.workers, report.view)
            used = max(self._views_used, report.view_known + SKIPPED)
            self._views_used = ViewNumber(used)
            if report.view is not None and _surely_newest(report.view, report):
                fenced = roster.started_at + self._policy.lease.fence_s
                self._learn_until = min(self._learn_until, fenced)
        view = self._view
        for status in report.workers:
            if view is not None and view.includes(status.worker, status.incarnation):
                self._trials.reached(status.committed, now)
        if news is News.CHANGE or before:
            self._changed = True
        return True

    # ------------------------------------------------------------ deciding

    def _review(self, reply_to: AgentId | None, now: float) -> list[CoordinatorEffect]:
        """Decide on all that is known, and tell whoever should act on it."""
        self._changed = False
        effects = list(self._advance(now))
        record = self._record()
        if record != self._persisted and self._learn_until is None:
            self._persisted = record
            effects.insert(0, Persist(record))
        effects += self._directives(reply_to)
        over = self._outcome is not None and self._roster.over(now, self._policy.lease.fence_s)
        if over and not self._finished:
            self._finished = True
            effects.append(Finish(self._outcome or ""))
        self._deadline = min((t for t in self._alarms() if t > now), default=None)
        return effects

    def _alarms(self) -> Iterator[float]:
        """Yield when time alone changes a decision, as far as one knows now."""
        lease, roster, policy = self._policy.lease, self._roster, self._policy
        for name in [*roster.nodes, *roster.unheard()]:
            heard_at = max(roster.heard_at(name), self._awake_since)
            yield heard_at + lease.suspect_s
            yield heard_at + lease.fence_s
            yield heard_at + lease.abandon_s + lease.margin_s
        yield from (s.respawn_at for s in roster.slots.values() if s.respawn_at is not None)
        if self._learn_until is not None:
            yield self._learn_until
        if self._running():
            yield self._still_since() + policy.hang_s
        else:
            yield self._trials.next_at
            yield self._came_at + policy.settle_s
            yield self._wanting_since + policy.late_s

    def _advance(self, now: float) -> Iterator[CoordinatorEffect]:
        if self._learns(now):
            return
        self._welcome()
        if self._outcome is not None:
            return
        yield from self._attend(now)
        if self._running():
            yield from self._supervise(now)
        yield from self._dismiss(now)
        if self._outcome is None and not self._running():
            yield from self._form(now)
        if self._outcome is None:
            for worker, why in replace_lost(self._situation(now), RestartPolicy()):
                yield Announce("lost", f"waiting process {worker} was lost: {why}", worker)
            yield from self._stillborn()

    def _learns(self, now: float) -> bool:
        """Tell whether agents may still run what a lost record knew."""
        if self._learn_until is None:
            return False
        if now < self._learn_until:
            return True
        self._learn_until = None
        restore_roles(self._roster)
        for worker in self._roster.slots:
            self._roster.order_anew(worker)
        return False

    def _welcome(self) -> None:
        for name, node in self._roster.nodes.items():
            if node.fresh:
                self._roster.welcome(name, self._view, recall=False)

    def _attend(self, now: float) -> Iterator[Announce]:
        """Let nodes take part, up to the number that may."""
        roster, policy = self._roster, self._policy
        silent, waiting = self._silent(now), []
        for name, node in roster.nodes.items():
            if roster.here(name) or name in silent or node.asks:
                continue
            if policy.working(node.offered) < 1:
                continue
            if len(roster.placed) >= policy.nodes_max:
                waiting.append(name)
                continue
            admit_node(roster, name)
            self._came_at = now
        situation = self._situation(now)
        not_drained = choose_drained(situation)
        self._attendance, news = attend(situation, tuple(waiting), not_drained, self._attendance)
        yield from (Announce(kind, line) for kind, line in news)

    def _supervise(self, now: float) -> Iterator[CoordinatorEffect]:
        """End the group if it has done its work, a process of it failed, or nodes come or go."""
        view, roster, policy = self._view, self._roster, self._policy
        assert view is not None
        ranks = ranks_of(view)
        statuses = [roster.status(m.worker, m.incarnation) for m in ranks]
        if all(s is not None and s.stage is Stage.EXITED for s in statuses):
            self._outcome = ""
            return
        lost = [name for name in roster.placed if self._node_lost(name, now)]
        fault = find_fault(view, roster, lost)
        if fault is None and now >= self._still_since() + policy.hang_s:
            fault = GroupFault(
                f"no process has been at work for {policy.hang_s:g} s: the group hangs"
            )
        if fault is not None:
            yield self._restart(fault, now)
        elif why := self._why_change(now):
            self._end_group(now)
            yield Announce("restart", f"{why}: the group is restarted")

    def _why_change(self, now: float) -> str:
        """Tell why a sound group should be another: a node is to leave, or can take part."""
        view, roster, policy = self._view, self._roster, self._policy
        assert view is not None
        inside = list(dict.fromkeys(m.agent for m in ranks_of(view)))
        ready = [n for n in ready_nodes(roster, policy, self._silent(now), view) if n not in inside]
        drained = [name for name in inside if roster.draining(name)]
        if drained and (ready or len(drained) < len(inside)):
            return f"node {drained[0]} is left: {roster.draining(drained[0])}"
        if ready and len(inside) < policy.nodes_max:
            return f"node {ready[0]} joins"
        return ""

    def _restart(self, fault: GroupFault, now: float) -> Announce:
        """End the group because of a fault, and the job if that was once too often."""
        policy, trials = self._policy, self._trials
        trials.failed(now, policy)
        detail = f"\n{fault.detail}" if fault.detail else ""
        if trials.in_vain > policy.restarts_max:
            times = f"{policy.restarts_max} restarts without progress in between"
            self._outcome = f"{fault.headline}, after {times}; --restarts-max allows more{detail}"
            if not policy.restarts_max:
                self._outcome = f"{fault.headline}; --restarts-max 0 allows no restart{detail}"
            return Announce("failed", self._outcome)
        self._end_group(now)
        wait_s = trials.next_at - now
        after = f" in {wait_s:.3g} s" if wait_s > 0 else ""
        count = f"{trials.in_vain} of at most {policy.restarts_max} without progress"
        text = f"{fault.headline}; the group is restarted{after} ({count}){detail}"
        return Announce("restart", text)

    def _end_group(self, now: float) -> None:
        """Order new processes in the place of the group's; the store's goes on if it lives."""
        view, roster = self._view, self._roster
        assert view is not None
        self._wanting_since = now
        for member in view.members:
            alive = not roster.dead(member.worker, member.incarnation)
            if member.worker in roster.slots and not (alive and member.worker == view.leader):
                roster.order_anew(member.worker)

    def _dismiss(self, now: float) -> Iterator[Announce]:
        """Take their slots from nodes that are lost, to make room for others."""
        for name in self._roster.placed:
            if self._node_lost(name, now):
                self._roster.dismiss(name)
                yield Announce("node", f"node {name} is lost")

    def _form(self, now: float) -> Iterator[CoordinatorEffect]:
        """Form the next group, once nothing of the one before runs any more."""
        policy, roster = self._policy, self._roster
        if now < self._trials.next_at or not self._gone(now):
            return
        silent = self._silent(now)
        present = [n for n in roster.placed if n not in silent and not roster.draining(n)]
        ready = ready_nodes(roster, policy, silent, None)
        if len(ready) < policy.nodes_min:
            return
        if len(ready) < len(present) and now < self._wanting_since + policy.late_s:
            return
        if len(ready) < policy.nodes_max and now < self._came_at + policy.settle_s:
            return
        ready = ready[: policy.nodes_max]  # more have slots if their record was lost
        number = ViewNumber(max(self._number, self._views_used) + 1)
        self._view = form_view(roster, policy, ready, number, self._trials.restarts)
        self._views_used = number
        self._trials.began(now)
        count, names = len(self._view.owners), ", ".join(ready)
        yield Announce("view", f"group {number}: {count} processes on {names}", None, number)

    def _stillborn(self) -> Iterator[Announce]:
        """Give up if a process fails before it is told a rank: the next one would as well."""
        view = self._view
        for status in self._roster.newest.values():
            if status.stage is not Stage.FAILED or not self._roster.ordered(status):
                continue
            if status.view != NO_VIEW:
                continue  # of a group that was lost with the journal
            if view is None or not view.includes(status.worker, status.incarnation):
                self._outcome = f"no process can be started: {status.detail}"
                yield Announce("failed", self._outcome, status.worker)
                return

    # ------------------------------------------------------------ telling

    def _directives(self, reply_to: AgentId | None) -> Iterator[SendDirective]:
        """Yield directives to agents with something new to hear, and in answer to reports."""
        for name in sorted(self._roster.nodes):
            node = self._roster.nodes[name]
            unseen = max(node.view_known, node.view_told) < self._number
            if name == reply_to or unseen or node.told != self._telling(name):
                yield self._answer(name)

    def _telling(self, name: AgentId) -> tuple[object, ...]:
        return self._outcome is None, self._learn_until is None, self._number, self._wanted(name)

    def _answer(self, name: AgentId) -> SendDirective:
        node, view = self._roster.nodes[name], self._view
        self._seq += 1
        node.view_told, node.told = self._number, self._telling(name)
        directive = Directive(
            term=self._term,
            seq=self._seq,
            agent=name,
            agent_incarnation=node.incarnation,
            heard=node.seq,
            wanted=self._wanted(name),
            view_number=self._number,
            view=view if view and node.view_known < view.number else None,
            undecided=self._learn_until is not None,
            shutdown=self._outcome is not None,
        )
        return SendDirective(directive)

    def _wanted(self, name: AgentId) -> tuple[WantedProcess, ...]:
        if self._outcome is not None or self._learn_until is not None:
            return ()
        return tuple(self._roster.wanted(name, self._view))

    # ------------------------------------------------------------ knowing

    @property
    def _number(self) -> ViewNumber:
        return self._view.number if self._view else NO_VIEW

    def _running(self) -> bool:
        """Tell whether there is a group whose processes should all run."""
        view = self._view
        return view is not None and all(
            self._roster.wants(m.worker, m.incarnation) for m in ranks_of(view)
        )

    def _gone(self, now: float) -> bool:
        """Tell whether no process of the last group can act any more, or of one unknown to us."""
        ranks = ranks_of(self._view) if self._view is not None else ()
        dead, roster = self._roster.dead, self._roster
        heard = [node for name, node in roster.nodes.items() if not self._node_lost(name, now)]
        told = [s for node in heard for s in node.statuses.values() if s.view != NO_VIEW]
        if any(s.stage.alive and not roster.ordered(s) for s in told):
            return False
        return all(dead(m.worker, m.incarnation) or self._node_lost(m.agent, now) for m in ranks)

    def _silent(self, now: float) -> frozenset[AgentId]:
        lease, roster = self._policy.lease, self._roster
        names = [*roster.nodes, *roster.unheard()]
        return frozenset(n for n in names if now >= self._heard_at(n) + lease.suspect_s)

    def _node_lost(self, name: AgentId, now: float) -> bool:
        """Tell whether a node's processes surely do not act any more, since its lease is over.

        Only a group that is all on one node goes on there without a coordinator, for `abandon_s`.
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

    def _situation(self, now: float) -> Situation:
        return Situation(
            view=self._view,
            roster=self._roster,
            lease=self._policy.lease,
            silent=self._silent(now),
            witness_at=now,
            now=now,
        )

    def _record(self) -> JobRecord:
        return JobRecord(
            term=self._term,
            view=self._view,
            views_used=self._views_used,
            slots=self._roster.slot_records(),
            workers_named=self._roster.workers_named,
            forgotten=self._forgotten,
            outcome=self._outcome,
        )


def _surely_newest(view: View, report: AgentReport) -> bool:
    """Tell whether no later group can have been formed, as far as one agent knows.

    A group that is all on one node acts there unheard for as long as nobody forms another. One on
    several nodes may have been given up for one on a node that is not heard now.
    """
    alive = [(s.worker, s.incarnation) for s in report.workers if s.stage.alive]
    return all((m.worker, m.incarnation) in alive for m in view.members)
