"""Decides for the job: members of views, hosts of virtual ranks, resume steps, replacements.

It does not know sockets, processes, files or clocks. It goes round one loop (decision_loop.py):

- **facts**: an event only updates facts. Reports change the roster; orders of people change the
  state of the job (job_state.py).
- **plan**: each decision is a function of facts (decisions.py), and returns changes. So a lost,
  late or repeated report can delay a decision but never change it.
- **apply**: changes are carried out in one place, before the next decision is made; then the record
  is made durable, and the agents concerned get directives.

The invariants: view numbers grow and are durable before any node knows them; a view is formed only
once every member of the one before has promised not to act in it, has ended, or has lost its right
to act; an incarnation is never ordered twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from holdfast.engine.core.directives import AgentReport, Directive, WantedProcess
from holdfast.engine.core.errors import require
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import decisions, formation
from holdfast.engine.core.membership.admission import recall_slots, welcome
from holdfast.engine.core.membership.changes import CountLoss
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorSnapshot,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.decision_loop import SKIPPED, DecisionLoop
from holdfast.engine.core.membership.facts import Facts, LatestFacts, has_witness
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
    PlanChange,
    ReleaseLoop,
    Remember,
    Stir,
    StopView,
)
from holdfast.engine.core.membership.job_end import Stopping
from holdfast.engine.core.membership.job_state import JobState, recall_state
from holdfast.engine.core.membership.live_roster import News
from holdfast.engine.core.membership.outbox import list_finishing
from holdfast.engine.core.membership.roster import describe_nodes
from holdfast.engine.core.membership.view_making import check_view
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import RELEASE_ALL, AgentId, ViewNumber
from holdfast.engine.core.views import View

Decision = Callable[[Facts, JobState], Sequence[CoordinatorChange]]


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
        self._learn_until = now + policy.lease.fence_s if forgotten else None
        passed_over = self._forgotten * SKIPPED
        self._job = recall_state(policy, term, record, self._roster, now, passed_over)
        self._checked: View | None = None
        self._latest_facts = LatestFacts()

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        return self._job.agenda.deadline

    def snapshot(self) -> CoordinatorSnapshot:
        """Return the state of the job for people."""
        job = self._job
        return dataclasses.replace(
            super().snapshot(),
            step=job.progress.step,
            stop_view=job.view_end.stopped,
            pending_view=job.view_end.planned,
            agents=describe_nodes(self._roster, job.attendance.silent),
        )

    def foresee_loss(self, node: AgentId, now: float) -> str:
        """Return a warning for people about a node that is asked to leave; empty: there is none."""
        job = self._job
        return job.handover.foresee_loss(self._facts(now), job.protection, job.durable, node)

    def check(self) -> None:
        view = self._view
        if view is not None and view is not self._checked:
            self._checked = view
            check_view(view, self._job.policy.virtual_ranks)
        require(self._job.view_end.stopped <= self._number, "stopping a view that does not exist")
        super().check()

    # ------------------------------------------------------------ facts

    def _hear(self, report: AgentReport, now: float) -> bool:
        roster, job, learns = self._roster, self._job, self._learn_until is not None
        news = roster.hear(report, now)
        if news is News.STALE:
            return False
        if learns:
            self._learn(report, now)
        job.durable.hear(filter(roster.is_ordered, report.workers))
        if job.note_steps(report, self._view):
            job.agenda.change(now)
        due = learns or news is News.CHANGE or job.handover.awaits_reports
        if due or report.agent in job.agenda.silent:
            job.agenda.change(now)
        if job.witness_at is None and news is News.CHANGE:
            if has_witness(roster, self._view, report.agent):
                job.witness_at = now
        return learns or not roster.nodes[report.agent].fresh

    def _learn(self, report: AgentReport, now: float) -> None:
        """Adopt the newest view that any agent knows, after the journal was lost."""
        job = self._job
        if report.view is not None and report.view.number > self._number:
            self._view = report.view
            self._views_used = ViewNumber(max(self._views_used, report.view.number + SKIPPED))
            job.progress.step = report.view.resume_step
        job.release_loop = max(job.release_loop, report.release_loop)
        job.servers = job.servers.recall_layout(report.workers)
        self._apply(recall_slots(self._roster, report.agent, report.workers, report.view), now)

    def _obey(self, order: StopRequested | ServersAsked, now: float) -> Sequence[Announce]:
        job = self._job
        job.agenda.change(now, at_once=True)
        if isinstance(order, ServersAsked):
            job.servers, lines = job.servers.scale(order.count)
            return lines
        if order.saves and job.stopping is None:
            after = max(job.progress.step, 1)  # by the reports so far
            job.stopping = Stopping(order.reason, after, now + job.policy.grace_s)
            job.last_saves = job.last_saves.order(job.durable.step, now)
            return [Announce("stop", "the job stops after a last checkpoint")]
        self._outcome = order.reason
        return [Announce("stop", order.reason)]

    def _facts(self, now: float) -> Facts:
        job = self._job
        plain = Facts(
            view=self._view,
            roster=self._roster,
            lease=job.policy.lease,
            silent=job.agenda.silent,
            witness_at=job.witness_at,
            now=now,
            room=job.reserve.room(),
            held_back=job.progress.held_back(self._view),
        )
        sources = (self._roster.version, job.followers)
        return self._latest_facts.update(plain, sources, job.followers.add_to)

    # ------------------------------------------------------------ plan and apply

    def _is_due(self, now: float) -> bool:
        return self._job.agenda.is_due(now)

    def _end_review(self, now: float) -> None:
        self._job.agenda.record_review(now, self._alarms())

    def _alarms(self) -> Iterator[float]:
        yield from self._job.list_alarms(self._roster)
        if self._learn_until is not None:
            yield self._learn_until
        if self._outcome is not None:
            fence_s = self._lease.fence_s
            yield from (node.heard_at + fence_s for node in self._roster.nodes.values())

    def _decide(self, now: float) -> list[CoordinatorEffect]:
        job, lines = self._job, list[CoordinatorEffect]()

        def go_through(*taken: Decision) -> None:
            for decide in taken:
                if self._outcome is None:
                    lines.extend(self._apply(decide(self._facts(now), job), now))

        job.progress.settle()
        if not self._has_learnt(now):
            return []
        self._apply(welcome(self._facts(now), recall=self._forgotten > 0), now)
        job.durable.take_in(filter(self._roster.is_ordered, self._roster.newest.values()))
        go_through(decisions.decide_on_news, decisions.decide_on_wrong, decisions.decide_servers)
        if not job.is_finishing:
            go_through(decisions.decide_spares, decisions.decide_admission)
            go_through(decisions.decide_silence, decisions.decide_drains)
            go_through(decisions.decide_handover)
        go_through(decisions.decide_on_hung)
        if not job.is_finishing:
            go_through(decisions.decide_on_lost)
        go_through(decisions.decide_end, decisions.decide_release, decisions.decide_finish)
        if not job.is_finishing or self._facts(now).has_unfinished():
            go_through(decisions.decide_stop, decisions.decide_separation)
            number = self._next_number
            go_through(partial(decisions.decide_replacements, number=number))
            go_through(partial(decisions.decide_view, number=number))
        if not job.is_finishing:
            go_through(decisions.decide_feeding, decisions.decide_change)
            go_through(decisions.decide_last_saves)
        return lines

    def _has_learnt(self, now: float) -> bool:
        """Return whether the agents have no part of a lost record left to send."""
        until = self._learn_until
        if until is not None and formation.has_learnt(self._facts(now), until):
            # Until now no worker could be ordered to continue.
            self._apply([EndLearning(), Stir()], now)
        return self._learn_until is None

    def _carry_out(self, change: CoordinatorChange, now: float) -> Sequence[Announce]:
        job = self._job
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
                job.progress.count_standstill()
            case Remember(memory):
                job.remember(memory)
            case Stir():
                job.agenda.stir(now)
            case MarkTold(status):
                job.event_log.mark(status)
                job.progress.record_words(status)
            case MarkJudged():
                job.durable.judge()
            case StopView(number):
                job.budget.record_trial(job.progress.step)
                job.view_end = job.view_end.stop(number)
            case PlanChange():
                job.view_end = job.view_end.plan(change)
            case AwaitBeginners(since):
                job.wanting_since = since
            case GoBack(invalidations):
                job.progress.go_back(invalidations)
            case InstallView():
                self._install_view(change, now)
            case ReleaseLoop(loop, leader):
                job.release_loop = max(job.release_loop, loop)
                if loop == RELEASE_ALL:
                    job.progress.record_end(leader)
            case _:
                self._roster.apply(change)
        return []

    def _count_loss(self, lost: CountLoss, now: float) -> Announce:
        job = self._job
        worker, machine, announced = lost.worker, lost.machine, lost.announced
        job.progress.count_loss(worker, lost.reason, machine, announced=announced)
        job.reserve = job.reserve.count_loss(lost.worker, self._roster, now)
        doubt = job.progress.doubt(lost.reason, job.policy.restart.losses_max)
        text = f"worker {lost.worker} was lost: {lost.reason}{doubt}"
        return Announce("lost", text, lost.worker, node=self._roster.slots[lost.worker].agent)

    def _install_view(self, change: InstallView, now: float) -> None:
        job = self._job
        job.progress.note_view(change.view, begins=change.begins)
        job.budget.spend(change.redone)
        self._view, self._views_used = change.view, change.view.number
        job.witness_at = None
        job.agenda.stir(now)
        job.progress.step = max(job.progress.step, change.view.resume_step)

    # ------------------------------------------------------------ telling

    def orders(self) -> Directive:
        """Return the part of directives for all agents, in a directive without an agent."""
        job = self._job
        return dataclasses.replace(
            super().orders(),
            stop_view=job.view_end.stopped,
            pending_view=job.view_end.planned,
            pending_save=job.view_end.saved,
            release_loop=job.release_loop,
            save_wanted=job.last_saves.newest,
            follow=job.followers.order,
            freed=job.handover.freed,
            servers=job.servers.book if self._outcome is None else (),
            layout=job.servers.layout if job.policy.servers else None,
        )

    def processes_for(self, name: AgentId) -> tuple[WantedProcess, ...]:
        """Return the processes that a node should run."""
        if not self._job.is_finishing or self._outcome is not None:
            return super().processes_for(name)
        undecided = self._learn_until is not None
        return () if undecided else tuple(list_finishing(self._roster, name, self._view))

    def _record(self) -> JobRecord:
        job = self._job
        return dataclasses.replace(
            super()._record(),
            release_loop=job.release_loop,
            saved=job.durable.steps,
            servers=job.servers.book,
            layout=job.servers.layout if job.policy.servers else None,
            invalidations=job.durable.invalidations,
            setbacks=job.progress.setbacks,
            ended=job.progress.ended,
        )
