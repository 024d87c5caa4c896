"""Decides for the job: members of views, hosts of virtual ranks, resume steps, replacements.

It does not know sockets, processes, files or clocks. It goes round one loop (decision_loop.py):

- **facts**: an event only updates facts. Reports change the roster; orders of people change the
  record.
- **plan**: each decision is a function of facts, all of them immutable, and returns changes. So a
  lost, late or repeated report can delay a decision but never change it.
- **apply**: changes are carried out in one place, before the next decision is made; then the record
  is made durable, and the agents concerned get directives.

The invariants: view numbers grow and are durable before any node knows them; a view is formed only
once every member of the one before has promised not to act in it, has ended, or has lost its right
to act; an incarnation is never ordered twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from holdfast.engine.core.directives import AgentReport, Directive, WantedProcess
from holdfast.engine.core.errors import require
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import formation, restart
from holdfast.engine.core.membership.admission import admit, welcome
from holdfast.engine.core.membership.changes import CountLoss
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorSnapshot,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.decision_loop import SKIPPED, DecisionLoop
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.event_log import EventLog
from holdfast.engine.core.membership.facts import Facts, LatestFacts
from holdfast.engine.core.membership.followers import ORDERS_PER_TERM, Followers, find_strays
from holdfast.engine.core.membership.handover import Handover
from holdfast.engine.core.membership.job_changes import (
    AwaitBeginners,
    CoordinatorChange,
    CountStandstill,
    EndJob,
    EndLearning,
    GoBack,
    InstallView,
    MarkJudged,
    MarkTold,
    Memory,
    Plan,
    PlanChange,
    ReleaseLoop,
    Remember,
    Stir,
    StopView,
)
from holdfast.engine.core.membership.job_end import (
    Stopping,
    break_standstill,
    plan_end,
    plan_stop,
    standstill_s,
)
from holdfast.engine.core.membership.last_saves import LastSaves
from holdfast.engine.core.membership.live_roster import News
from holdfast.engine.core.membership.next_view import NextView
from holdfast.engine.core.membership.parting import are_all_waiting
from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.membership.reserve import Reserve, ReservePolicy
from holdfast.engine.core.membership.review_schedule import Agenda
from holdfast.engine.core.membership.server_places import ServerPlaces
from holdfast.engine.core.membership.view_end import (
    ViewEnd,
    plan_change,
    plan_handover,
)
from holdfast.engine.core.membership.view_making import (
    check_view,
)
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.step.speculation import Budget
from holdfast.engine.core.types import RELEASE_ALL, AgentId, ViewNumber
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage


class CoordinatorMachine(DecisionLoop[CoordinatorChange]):
    """Decides for the job, as the module describes; `handle` is the only mutator."""

    def __init__(
        self,
        policy: CoordinatorPolicy,
        term: int,
        record: JobRecord | None,
        now: float,
        forgotten: int = 0,
    ) -> None:
        super().__init__(policy.lease, term, record, now, forgotten)
        self._policy = policy
        self._learn_until = now + policy.lease.fence_s if forgotten else None
        self._release_loop = record.release_loop if record else 0
        self._stopping: Stopping | None = None  # the operator's request
        self._durable = Durable(record.saved, record.invalidations) if record else Durable()
        self._view_end = ViewEnd()
        self._witness_at: float | None = None  # see core/membership/lease.py
        self._wanting_since: float | None = None  # since when a first view could not be formed
        past = (record.setbacks, record.ended) if record else ()
        self._progress = Progress(self._view.resume_step if self._view else 0, *past)
        self._budget = Budget(policy.speculation, policy.virtual_ranks)
        self._followers = Followers(enabled=policy.feeds, newest=term * ORDERS_PER_TERM)
        held_back = ReservePolicy(
            virtual_ranks=policy.virtual_ranks, spares=policy.spares, hot=policy.hot_spares
        )
        self._reserve = Reserve(policy=held_back, looked_at=now)
        self._last_saves = LastSaves(last=term * ORDERS_PER_TERM)
        self._protection = Protection(policy.redundancy, policy.shards_told, policy.servers)
        self._handover = Handover(replicated=policy.replicated)
        self._server_places = ServerPlaces.recall(policy, record, self._forgotten * SKIPPED)
        self._agenda = Agenda(policy, self._roster, now)
        self._event_log = EventLog(record.slots if record else ())
        self._checked: View | None = None
        self._latest_facts = LatestFacts()

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        return self._agenda.deadline

    def snapshot(self) -> CoordinatorSnapshot:
        return self._snapshot(self._progress.step, self._view_end.stopped, self._view_end.planned)

    def foresee_loss(self, node: AgentId, now: float) -> str:
        """Return a warning for people about a node that is asked to leave; empty: there is none."""
        return self._handover.foresee_loss(self._facts(now), self._protection, self._durable, node)

    def check(self) -> None:
        view = self._view
        if view is not None and view is not self._checked:
            self._checked = view
            check_view(view, self._policy.virtual_ranks)
        require(self._view_end.stopped <= self._number, "stopping a view that does not exist")
        super().check()

    # ------------------------------------------------------------ facts

    def _hear(self, report: AgentReport, now: float) -> bool:
        roster, learns = self._roster, self._learn_until is not None
        news = roster.hear(report, now)
        if news is News.STALE:
            return False
        if learns:
            self._learn(report)
        self._durable.hear(filter(roster.is_ordered, report.workers))
        self._note_step(report, now)
        due = learns or news is News.CHANGE or self._handover.awaits_reports
        if due or report.agent in self._agenda.silent:
            self._agenda.change(now)
        if self._witness_at is None and news is News.CHANGE and self._view is not None:
            members = (self._view.member(w) for w in roster.workers_on(report.agent))
            if any(m is not None and self._is_witness(m) for m in members):
                self._witness_at = now
        return learns or not roster.nodes[report.agent].fresh

    def _note_step(self, report: AgentReport, now: float) -> None:
        view = self._view
        for status in report.workers:
            if view is not None and view.includes(status.worker, status.incarnation):
                if self._progress.record_step(status.committed) and view.suspended:
                    self._agenda.change(now)  # suspended workers fall further behind

    def _is_witness(self, member: Member) -> bool:
        status = self._roster.status(member.worker, member.incarnation)
        has_promised = status is not None and status.promised >= self._number
        return has_promised or self._roster.is_dead(member.worker, member.incarnation)

    def _learn(self, report: AgentReport) -> None:
        """Adopt the newest view that any agent knows, after the journal was lost."""
        if report.view is not None and report.view.number > self._number:
            self._view = report.view
            self._views_used = ViewNumber(max(self._views_used, report.view.number + SKIPPED))
            self._progress.step = report.view.resume_step
        self._release_loop = max(self._release_loop, report.release_loop)
        self._server_places = self._server_places.recall_layout(report.workers)
        self._recall(report)

    def _obey(self, order: StopRequested | ServersAsked, now: float) -> Sequence[Announce]:
        self._agenda.change(now, at_once=True)
        if isinstance(order, ServersAsked):
            self._server_places, lines = self._server_places.scale(order.count)
            return lines
        if order.saves and self._stopping is None:
            after = max(self._progress.step, 1)  # by the reports so far
            self._stopping = Stopping(order.reason, after, now + self._policy.grace_s)
            self._last_saves = self._last_saves.order(self._durable.step, now)
            return [Announce("stop", "the job stops after a last checkpoint")]
        self._outcome = order.reason
        return [Announce("stop", order.reason)]

    def _facts(self, now: float) -> Facts:
        plain = Facts(
            view=self._view,
            roster=self._roster,
            lease=self._policy.lease,
            silent=self._agenda.silent,
            witness_at=self._witness_at,
            now=now,
            room=self._reserve.room(),
            held_back=self._progress.held_back(self._view),
        )
        sources = (self._roster.version, self._followers)
        return self._latest_facts.update(plain, sources, self._followers.add_to)

    # ------------------------------------------------------------ plan

    def _is_due(self, now: float) -> bool:
        return self._agenda.is_due(now)

    def _end_review(self, now: float) -> None:
        self._agenda.record_review(now, self._alarms())

    def _alarms(self) -> Iterator[float]:
        """Yield when time alone changes a decision, for reasons of the whole job."""
        lease = self._policy.lease
        if self._witness_at is not None:
            yield self._witness_at + lease.fence_s
        if self._wanting_since is not None:
            yield self._wanting_since + self._policy.settle_s
        if self._learn_until is not None:
            yield self._learn_until
        if self._stopping is not None:
            yield self._stopping.until
        if self._progress.standstills:
            yield self._agenda.still_since + standstill_s(self._progress, self._policy.hang_s)
        if self._last_saves.due_at is not None:
            yield self._last_saves.due_at
        if self._followers.order is not None:
            yield from (
                node.leave_by - formation.LEAVE_RESERVE_S for node in self._roster.nodes.values()
            )
        yield from self._handover.list_alarms()
        yield from self._server_places.list_alarms(self._roster, lease)
        if self._outcome is not None:
            yield from (n.heard_at + lease.fence_s for n in self._roster.nodes.values())

    def _decide(self, now: float) -> list[CoordinatorEffect]:
        self._progress.settle()
        self._apply(self._plan_to_learn(self._facts(now)), now)
        if self._learn_until is not None:
            return []
        self._apply(welcome(self._facts(now), recall=self._forgotten > 0), now)
        self._durable.take_in(filter(self._roster.is_ordered, self._roster.newest.values()))
        if self._outcome is not None:
            return []
        lines: list[CoordinatorEffect] = []

        def go_through(*decisions: Callable[[Facts], Sequence[CoordinatorChange]]) -> None:
            for decide in decisions:
                lines.extend(self._apply(decide(self._facts(now)), now))

        go_through(self._plan_to_tell, self._plan_to_judge, self._plan_servers)
        if self._release_loop < RELEASE_ALL:
            go_through(self._plan_spares, self._plan_admission)
            go_through(self._plan_silence, self._plan_drains, self._plan_handover)
        go_through(self._plan_for_hung)
        if self._release_loop < RELEASE_ALL:
            go_through(self._plan_for_lost)
        go_through(self._plan_end, self._plan_release, self._plan_finish)
        if self.outcome is not None:
            return lines
        finishing = self._release_loop == RELEASE_ALL
        if not finishing or self._facts(now).has_unfinished():
            go_through(self._plan_stop, self._plan_separation)
            go_through(self._plan_replacements, self._plan_view)
        if not finishing:
            go_through(self._plan_feeding, self._plan_change, self._plan_last_saves)
        return lines

    def _plan_to_learn(self, facts: Facts) -> Plan:
        """Find out whether something of a lost record may still come from the agents."""
        if self._learn_until is None or not formation.has_learnt(facts, self._learn_until):
            return []
        # Until now no worker could be ordered to continue.
        return [EndLearning(), Stir()]

    def _plan_to_tell(self, facts: Facts) -> Plan:
        log = self._event_log
        speaking = [each for each in facts.roster.newest.values() if not log.is_told(each)]
        return [*log.news(speaking), *map(MarkTold, speaking)] if speaking else []

    def _plan_to_judge(self, facts: Facts) -> Plan:
        """Quarantine workers that compute wrongly."""
        if not (accused := self._durable.accused):
            return []
        return [*restart.quarantine_wrong(facts, accused, self._policy.restart), MarkJudged()]

    def _plan_spares(self, facts: Facts) -> Plan:
        reserve, plan = self._reserve.review(facts.roster, facts.view, facts.now)
        return [Remember(reserve), *plan]

    def _plan_admission(self, facts: Facts) -> Plan:
        waiting, plan = admit(facts, self._policy)
        attendance, lines = self._attendance.tell_waiting(waiting, self._policy.spread)
        return [*plan, Remember(attendance), *lines]

    def _plan_handover(self, facts: Facts) -> Plan:
        kept = self._protection, self._durable
        return plan_handover(facts, self._policy, self._handover, *kept)

    def _plan_servers(self, facts: Facts) -> Plan:
        places, lines = self._server_places.review(facts)
        return [Remember(places), *lines]

    def _plan_for_hung(self, facts: Facts) -> Plan:
        """Replace workers if the job makes no progress for very long while a member waits."""
        excused = facts.has_no_room() or any(map(facts.find_silent_node, facts.members))
        still_since = facts.now if excused else self._agenda.still_since
        hang_s = self._policy.hang_s
        if facts.now < still_since + hang_s:
            return [Stir()] if excused else []
        if are_all_waiting(facts):
            stopped = self._view_end.stopped
            return break_standstill(facts, self._progress, still_since, hang_s, stopped)
        return [*restart.replace_all(restart.find_hung(facts), f"hung for {hang_s:g} s"), Stir()]

    def _plan_for_lost(self, facts: Facts) -> Plan:
        bridges = self._protection.make_coverage_test(facts, self._durable)
        return [*restart.replace_lost(facts, self._policy.restart, bridges)]

    def _plan_end(self, facts: Facts) -> Plan:
        """End the job if it has failed, or has been stopped."""
        plan = plan_end(facts, self._progress, self._policy)
        return plan or plan_stop(self._stopping, self._durable.step, facts.now)

    def _plan_release(self, facts: Facts) -> Plan:
        """Release ended workers once the leader's script is past the loop."""
        view = facts.view
        member = view.member(view.leader) if view else None
        leader = facts.status(member) if member else None
        if self._outcome is not None or leader is None:
            return []
        loop = RELEASE_ALL if leader.stage is Stage.EXITED else leader.loop - 1
        return [ReleaseLoop(loop, leader)]

    def _plan_finish(self, facts: Facts) -> Plan:
        """End the job once all scripts have ended."""
        if self._outcome is not None:
            return []
        if self._release_loop < RELEASE_ALL:
            return [EndJob("")] if facts.roster.have_all_exited() else []
        if why := self._progress.reason_of_uneven_ends(facts.roster.newest.values()):
            return [EndJob(why), Announce("failed", why)]
        return [EndJob("")] if all(map(facts.is_fenced, facts.members)) else []

    def _plan_stop(self, facts: Facts) -> Plan:
        """Stop the present view if it is broken."""
        view = facts.view
        if view is None or self._view_end.stopped >= view.number:
            return []
        waited_s = facts.now - self._agenda.still_since
        minds_late = self._budget.allows(self._progress.step)
        reason = formation.reason_to_stop(facts, waited_s, self._policy.patience_s, minds_late)
        if reason is None:
            return []
        text = f"view {view.number} is stopped: {reason}"
        return [StopView(view.number), Announce("stop_view", text, None, view.number)]

    def _plan_separation(self, facts: Facts) -> Plan:
        """Leave out workers that other members do not reach, once none can act in the view."""
        if formation.survivors_of(facts) is None:
            return []
        policy, left_out = self._policy.restart, formation.choose_unreachable(facts)
        return [
            change for worker in left_out for change in restart.quarantine(facts, worker, policy)
        ]

    def _plan_replacements(self, facts: Facts) -> Plan:
        return self._next_view.plan_replacements(facts, self._progress)

    def _plan_view(self, facts: Facts) -> Plan:
        return self._next_view.plan(facts)

    @property
    def _next_view(self) -> NextView:
        """Return the planner of the next view, with everything that decides it now."""
        return NextView(
            policy=self._policy,
            protection=self._protection,
            durable=self._durable,
            number=self._next_number,
            finishing=self._release_loop == RELEASE_ALL,
            wanting_since=self._wanting_since,
        )

    def _plan_feeding(self, facts: Facts) -> Plan:
        """Order members to feed workers that could join; replace fed workers that cannot."""
        policy = self._policy
        trains = not self._view_end.is_decided(self._number) and self._stopping is None
        trains = trains and len(facts.members) >= policy.workers_min
        trains = trains and not any(status.ended for status in facts.known)
        room = formation.room_beside_drained(facts)
        followers, lines = self._followers.review(facts, room, may_order=trains)
        found = find_strays(facts, followers.order)
        plan = restart.replace_all(found, "it was fed, and not until it could join")
        return [Remember(followers), *lines, *plan]

    def _plan_change(self, facts: Facts) -> Plan:
        step = self._progress.step
        return plan_change(facts, self._view_end, self._policy, self._handover, step)

    def _plan_last_saves(self, facts: Facts) -> Plan:
        saves, lines = self._last_saves.review(facts, self._durable.step, self._handover.saves)
        return [Remember(saves), *(lines if self._policy.keeps else ())]

    # ------------------------------------------------------------ apply

    def _carry_out(self, change: CoordinatorChange, now: float) -> Sequence[Announce]:
        match change:
            case Announce():
                return [change]
            case CountLoss():
                return [self._count_loss(change, now)]
            case EndLearning():
                self._learn_until = None
            case EndJob(outcome):
                self._outcome = outcome
            case CountStandstill():
                self._progress.count_standstill()
            case Remember(memory):
                self._remember(memory)
            case Stir():
                self._agenda.stir(now)
            case MarkTold(status):
                self._event_log.mark(status)
                self._progress.record_words(status)
            case MarkJudged():
                self._durable.judge()
            case StopView(number):
                self._budget.record_trial(self._progress.step)
                self._view_end = self._view_end.stop(number)
            case PlanChange():
                self._view_end = self._view_end.plan(change)
            case AwaitBeginners(since):
                self._wanting_since = since
            case GoBack(invalidations):
                self._progress.go_back(invalidations)
            case InstallView():
                self._install_view(change, now)
            case ReleaseLoop(loop, leader):
                self._release_loop = max(self._release_loop, loop)
                if loop == RELEASE_ALL:
                    self._progress.record_end(leader)
            case _:
                self._roster.apply(change)
        return []

    def _count_loss(self, lost: CountLoss, now: float) -> Announce:
        self._progress.count_loss(lost.worker, lost.reason, lost.machine)
        self._reserve = self._reserve.count_loss(lost.worker, self._roster, now)
        doubt = self._progress.doubt(lost.reason, self._policy.restart.losses_max)
        text = f"worker {lost.worker} was lost: {lost.reason}{doubt}"
        return Announce("lost", text, lost.worker, node=self._roster.slots[lost.worker].agent)

    def _install_view(self, change: InstallView, now: float) -> None:
        self._progress.note_view(change.view, begins=change.begins)
        self._budget.spend(change.redone)
        self._view, self._views_used = change.view, change.view.number
        self._witness_at = None
        self._agenda.stir(now)
        self._progress.step = max(self._progress.step, change.view.resume_step)

    def _remember(self, memory: Memory) -> None:
        match memory:
            case Followers():
                self._followers = memory
            case Handover():
                self._handover = memory
            case LastSaves():
                self._last_saves = memory
            case Protection():
                self._protection = memory
            case Reserve():
                self._reserve = memory
            case ServerPlaces():
                self._server_places = memory
            case _:
                super()._remember(memory)

    # ------------------------------------------------------------ telling

    def _orders(self) -> Directive:
        return dataclasses.replace(
            super()._orders(),
            stop_view=self._view_end.stopped,
            pending_view=self._view_end.planned,
            pending_save=self._view_end.saved,
            release_loop=self._release_loop,
            save_wanted=self._last_saves.newest,
            follow=self._followers.order,
            freed=self._handover.freed,
            servers=self._server_places.book if self._outcome is None else (),
            layout=self._server_places.layout if self._policy.servers else None,
        )

    def _processes_for(self, name: AgentId) -> tuple[WantedProcess, ...]:
        if self._release_loop < RELEASE_ALL or self._outcome is not None:
            return super()._processes_for(name)
        undecided = self._learn_until is not None
        return () if undecided else tuple(self._roster.processes_to_finish(name, self._view))

    def _record(self) -> JobRecord:
        return dataclasses.replace(
            super()._record(),
            release_loop=self._release_loop,
            saved=self._durable.steps,
            servers=self._server_places.book,
            layout=self._server_places.layout if self._policy.servers else None,
            invalidations=self._durable.invalidations,
            setbacks=self._progress.setbacks,
            ended=self._progress.ended,
        )
