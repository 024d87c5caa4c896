"""Runs a coordinator: reports become facts, facts become plans, and plans are applied.

Both coordinators, of workers and of groups, are such a loop. `_hear` and `_obey` take facts in. The
functions of decisions.py and group_decisions.py read, and return changes (changes.py). Only
`_apply` carries changes out, in the order of the plan, before the next decision is made. A test
fails if a decision assigns to any attribute.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from holdfast.engine.core.directives import SIGTERM, AgentReport, Directive, WantedProcess
from holdfast.engine.core.errors import assert_never, require
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSnapshot,
    Finish,
    Persist,
    ReportArrived,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.event_log import EventChain
from holdfast.engine.core.membership.live_roster import LiveRoster
from holdfast.engine.core.membership.outbox import Outbox, list_wanted
from holdfast.engine.core.membership.roster import describe_nodes, have_all_ended
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.types import NO_VIEW, AgentId, Incarnation, Tick, ViewNumber
from holdfast.engine.core.views import View

SKIPPED = 1000  # numbers passed over after the loss of the journal: more than were given unheard


AnyChange = TypeVar("AnyChange")


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
        self._chain = EventChain(term, self._view)
        self._outbox = Outbox(self._roster)
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
            effects.append(self._outbox.answer(self, reply_to))
        return self._chain.link(event, effects, self._view, now)

    @abc.abstractmethod
    def _hear(self, report: AgentReport, now: float) -> bool:
        """Take in a report; return whether to answer now, before a review."""

    @abc.abstractmethod
    def _obey(self, order: StopRequested | ServersAsked, now: float) -> Sequence[Announce]:
        """Take in an operator's order; return lines on it."""

    # ------------------------------------------------------------ plan and apply

    @abc.abstractmethod
    def _is_due(self, now: float) -> bool:
        """Return whether to review the facts now."""

    def _review(self, reply_to: AgentId | None, now: float) -> list[CoordinatorEffect]:
        """Make all decisions, and send their results to the agents concerned."""
        self._outbox.begin_review()
        effects = self._decide(now)
        record = self._record()
        if record != self._persisted and self._learn_until is None:
            self._persisted = record
            effects.insert(0, Persist(record))
        effects += self._outbox.list_new(self, reply_to)
        over = self._outcome is not None and have_all_ended(self._roster, now, self._lease.fence_s)
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

    @abc.abstractmethod
    def _carry_out(self, change: AnyChange, now: float) -> Sequence[Announce]:
        """Carry out one change; return the lines for the job's event log."""

    # ------------------------------------------------------------ telling

    def orders(self) -> Directive:
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

    def processes_for(self, name: AgentId) -> tuple[WantedProcess, ...]:
        """Return the processes that a node should run."""
        if self._outcome is not None or self._learn_until is not None:
            return ()
        return tuple(list_wanted(self._roster, name, self._view))

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

    def snapshot(self) -> CoordinatorSnapshot:
        """Return the state of the job for people."""
        return CoordinatorSnapshot(
            record=self._record(),
            step=0,
            stop_view=NO_VIEW,
            pending_view=NO_VIEW,
            agents=describe_nodes(self._roster, ()),
            workers=tuple(s for _, s in sorted(self._roster.newest.items())),
            finished=self._finished,
            freed=tuple(each.agent for each in self.orders().freed),
        )

    def check(self) -> None:
        saved = self._persisted in (None, self._record())
        require(saved or self._learn_until is not None, "unsaved record")

    @property
    def _number(self) -> ViewNumber:
        return self._view.number if self._view else NO_VIEW

    @property
    def _next_number(self) -> ViewNumber:
        return ViewNumber(max(self._number, self._views_used) + 1)

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
