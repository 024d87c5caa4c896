"""Runs a coordinator: reports become facts, facts become plans, and plans are applied.

Both coordinators, of workers and of groups, are such a loop. `_hear` and `_stop` take facts in.
Methods named `_plan_...` decide: they read, and return changes (changes.py). Only `_apply` carries
changes out, in the order of the plan, before the next decision is made. A test fails
if any other method assigns to a machine's attributes.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from holdfast.engine.core.directives import SIGTERM, AgentReport, Directive, WantedProcess
from holdfast.engine.core.errors import assert_never, require
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.admission import Attendance, drain, recall_slots
from holdfast.engine.core.membership.changes import Change
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSnapshot,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.event_log import EventChain
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.job_changes import Memory, Remember
from holdfast.engine.core.membership.live_roster import LiveRoster
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.types import NO_VIEW, AgentId, Incarnation, Tick, ViewNumber
from holdfast.engine.core.views import View

SKIPPED = 1000  # numbers passed over after the loss of the journal: more than were given unheard


AnyChange = TypeVar("AnyChange")


@dataclass(frozen=True, slots=True)
class _Sent:
    """Describes the last directive that was sent to an agent."""

    #: The incarnation of the agent.
    incarnation: Incarnation
    #: The part for all agents.
    common: Directive
    wanted: tuple[WantedProcess, ...]
    #: The last review before it: until the next, both stay as they are.
    review: int


@dataclass(slots=True)
class _Told:
    """Keeps the newest directives of agents. `reviews`: their number, also before each `sent`."""

    seq: int = 0
    reviews: int = 0
    #: The last directive to each agent.
    sent: dict[AgentId, _Sent] = field(default_factory=dict)
    common: Directive | None = None  # the newest part for all agents


class DecisionLoop(abc.ABC, Generic[AnyChange]):
    """Decides for a job, as the module describes; `handle` is the only mutator.

    `forgotten`: greater with each record that was lost; if not 0, the machine first learns from the
    agents, and passes over numbers that the lost record may have given.
    """

    def __init__(
        self, lease: LeasePolicy, term: int, record: JobRecord | None, now: float, forgotten: int
    ) -> None:
        self._lease = lease
        self._term = term
        self._view = record.view if record else None
        self._forgotten = record.forgotten if record else forgotten
        passed_over = self._forgotten * SKIPPED
        self._views_used = record.views_used if record else ViewNumber(passed_over)
        self._outcome = record.outcome if record else None
        self._end_signal = SIGTERM
        self._roster = LiveRoster(record, now, Incarnation(passed_over + 1))
        self._persisted = record
        self._learn_until: float | None = None
        self._attendance = Attendance()
        self._chain = EventChain(term, self._view)
        self._told = _Told()
        self._finished = False

    # ------------------------------------------------------------ facts

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event at time `now` (seconds); return effects in order."""
        effects: list[CoordinatorEffect] = []
        reply_to: AgentId | None = None
        match event:
            case ReportArrived(report):
                if self._hear(report, now):
                    reply_to = report.agent
            case StopRequested() | ServersAsked():
                if self._outcome is None:
                    effects += self._obey(event, now)
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._is_due(now):
            effects += self._review(reply_to, now)
        elif reply_to:
            effects.append(self._answer(reply_to))
        return self._chain.link(event, effects, self._view, now)

    @abc.abstractmethod
    def _hear(self, report: AgentReport, now: float) -> bool:
        """Take in a report; return whether to answer now, before a review."""

    @abc.abstractmethod
    def _obey(self, order: StopRequested | ServersAsked, now: float) -> Sequence[Announce]:
        """Take in an operator's order; return lines on it."""

    def _recall(self, report: AgentReport) -> None:
        """Restore slots from a report, since the record that had them is lost."""
        for change in recall_slots(self._roster, report.agent, report.workers, report.view):
            self._roster.apply(change)

    # ------------------------------------------------------------ plan and apply

    @abc.abstractmethod
    def _is_due(self, now: float) -> bool:
        """Return whether to review the facts now."""

    def _review(self, reply_to: AgentId | None, now: float) -> list[CoordinatorEffect]:
        """Make all decisions, and send their results to the agents concerned."""
        self._told.reviews += 1
        effects = self._decide(now)
        record = self._record()
        if record != self._persisted and self._learn_until is None:
            self._persisted = record
            effects.insert(0, Persist(record))
        effects += self._directives(reply_to)
        over = self._outcome is not None and self._roster.is_over(now, self._lease.fence_s)
        if over and not self._finished:
            self._finished = True
            effects.append(Finish(self._outcome or ""))
        self._end_review(now)
        return effects

    @abc.abstractmethod
    def _decide(self, now: float) -> list[CoordinatorEffect]:
        """Make all decisions, and apply each before the next; return lines for the event log."""

    @abc.abstractmethod
    def _end_review(self, now: float) -> None:
        """Find out when to review again."""

    def _apply(self, plan: Iterable[AnyChange], now: float) -> list[CoordinatorEffect]:
        """Carry out a plan, in order; return the lines for the job's event log."""
        return [line for change in plan for line in self._carry_out(change, now)]

    def _plan_silence(self, facts: Facts) -> list[Remember | Announce]:
        attendance, lines = self._attendance.tell_silent(facts)
        return [Remember(attendance), *lines]

    def _plan_drains(self, facts: Facts) -> list[Change | Remember]:
        not_drained, plan = drain(facts)
        attendance, lines = self._attendance.tell_not_drained(not_drained)
        return [*plan, Remember(attendance), *lines]

    def _remember(self, memory: Memory) -> None:
        """Keep what a decision has to know later."""
        match memory:
            case Attendance():
                self._attendance = memory
            case _:
                raise AssertionError(f"nothing here remembers {memory}")

    @abc.abstractmethod
    def _carry_out(self, change: AnyChange, now: float) -> Sequence[Announce]:
        """Carry out one change; return the lines for the job's event log."""

    # ------------------------------------------------------------ telling

    def _directives(self, reply_to: AgentId | None) -> list[CoordinatorEffect]:
        """Return directives to agents for which there is a new one, and in answer to a report."""
        found = list[CoordinatorEffect]()
        common = self._refresh_common()
        for name in sorted(self._roster.nodes):
            report, sent = self._roster.nodes[name].report, self._told.sent.get(name)
            if sent is not None and sent.incarnation != report.incarnation:
                sent = None
            known = max(report.view_known, sent.common.view_number if sent else NO_VIEW)
            new = (
                sent is None
                or sent.common is not common
                or sent.wanted != self._processes_for(name)
            )
            if name == reply_to or known < self._number or new:
                found.append(self._answer(name))
        return found

    def _refresh_common(self) -> Directive:
        """Return the part of directives for all agents: the same object while it is the same."""
        now = self._orders()
        if self._told.common is None or now != self._told.common:
            self._told.common = now
        return self._told.common

    def _answer(self, name: AgentId) -> SendDirective:
        report, view, sent = self._roster.nodes[name].report, self._view, self._told.sent.get(name)
        as_now = (report.incarnation, self._told.reviews)
        # While it learns, a report alone may change the directive.
        learns = self._learn_until is not None
        if sent is None or learns or (sent.incarnation, sent.review) != as_now:
            common, wanted = self._refresh_common(), self._processes_for(name)
            sent = _Sent(report.incarnation, common, wanted, self._told.reviews)
            self._told.sent[name] = sent
        self._told.seq += 1
        directive = dataclasses.replace(
            sent.common,
            seq=self._told.seq,
            agent=name,
            agent_incarnation=report.incarnation,
            heard=report.seq,
            wanted=sent.wanted,
            view=view if view and report.view_known < view.number else None,
        )
        return SendDirective(directive)

    def _orders(self) -> Directive:
        """Return the part of directives for all agents, in a directive without an agent."""
        return Directive(
            term=self._term,
            seq=0,
            agent=AgentId(""),
            agent_incarnation=Incarnation(0),
            view_number=self._number,
            undecided=self._learn_until is not None,
            shutdown=self._outcome is not None,
            end_signal=self._end_signal,
        )

    def _processes_for(self, name: AgentId) -> tuple[WantedProcess, ...]:
        if self._outcome is not None or self._learn_until is not None:
            return ()
        return tuple(self._roster.processes_for(name, self._view))

    # ------------------------------------------------------------ knowing

    @property
    def view(self) -> View | None:
        return self._view

    @property
    def outcome(self) -> str | None:
        """Return the outcome of the job: None while it runs, empty for success."""
        return self._outcome

    @abc.abstractmethod
    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""

    @abc.abstractmethod
    def snapshot(self) -> CoordinatorSnapshot: ...

    def check(self) -> None:
        saved = self._persisted in (None, self._record())
        require(saved or self._learn_until is not None, "unsaved record")

    @property
    def _number(self) -> ViewNumber:
        return self._view.number if self._view else NO_VIEW

    @property
    def _next_number(self) -> ViewNumber:
        return ViewNumber(max(self._number, self._views_used) + 1)

    def _snapshot(
        self, step: int, stop_view: ViewNumber, pending_view: ViewNumber = NO_VIEW
    ) -> CoordinatorSnapshot:
        return CoordinatorSnapshot(
            record=self._record(),
            step=step,
            stop_view=stop_view,
            pending_view=pending_view,
            agents=self._roster.snapshot(self._attendance.silent),
            workers=tuple(s for _, s in sorted(self._roster.newest.items())),
            finished=self._finished,
            freed=tuple(each.agent for each in self._orders().freed),
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
