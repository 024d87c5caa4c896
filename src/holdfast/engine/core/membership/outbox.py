"""Makes the directives of agents, and finds whom a review has anything new for. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.core.directives import Directive, WantedProcess
from holdfast.engine.core.membership.coordinator_events import SendDirective
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.types import NO_VIEW, AgentId, Incarnation, WorkerId
from holdfast.engine.core.views import View


class DirectiveSource(Protocol):
    """Knows what agents are ordered; the orders change in reviews alone."""

    @property
    def view(self) -> View | None: ...

    def orders(self) -> Directive:
        """Return the part of directives for all agents, in a directive without an agent."""
        ...

    def processes_for(self, name: AgentId) -> tuple[WantedProcess, ...]:
        """Return the processes that a node should run."""
        ...


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


class Outbox:
    """Makes directives from the part for all agents and the processes of each node."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._seq = 0
        self._reviews = 0
        self._sent: dict[AgentId, _Sent] = {}
        self._common: Directive | None = None  # the newest part for all agents

    def begin_review(self) -> None:
        """Record that the orders may change from now on."""
        self._reviews += 1

    def list_new(
        self, source: DirectiveSource, reply_to: AgentId | None
    ) -> Iterator[SendDirective]:
        """Yield directives to agents for which there is a new one, and in answer to a report."""
        common = self._refresh_common(source)
        number = source.view.number if source.view else NO_VIEW
        for name in sorted(self._roster.nodes):
            report, sent = self._roster.nodes[name].report, self._sent.get(name)
            if sent is not None and sent.incarnation != report.incarnation:
                sent = None
            known = max(report.view_known, sent.common.view_number if sent else NO_VIEW)
            new = (
                sent is None
                or sent.common is not common
                or sent.wanted != source.processes_for(name)
            )
            if name == reply_to or known < number or new:
                yield self.answer(source, name)

    def answer(self, source: DirectiveSource, name: AgentId) -> SendDirective:
        """Return the present directive to an agent, in answer to its last report."""
        report, view, sent = self._roster.nodes[name].report, source.view, self._sent.get(name)
        as_now = (report.incarnation, self._reviews)
        # While the coordinator learns, a report alone may change the directive.
        learns = sent is not None and sent.common.undecided
        if sent is None or learns or (sent.incarnation, sent.review) != as_now:
            common, wanted = self._refresh_common(source), source.processes_for(name)
            sent = self._sent[name] = _Sent(report.incarnation, common, wanted, self._reviews)
        self._seq += 1
        directive = dataclasses.replace(
            sent.common,
            seq=self._seq,
            agent=name,
            agent_incarnation=report.incarnation,
            heard=report.seq,
            wanted=sent.wanted,
            view=view if view and report.view_known < view.number else None,
        )
        return SendDirective(directive)

    def _refresh_common(self, source: DirectiveSource) -> Directive:
        """Return the part of directives for all agents: the same object while it is the same."""
        now = source.orders()
        if self._common is None or now != self._common:
            self._common = now
        return self._common


def list_wanted(roster: Roster, name: AgentId, view: View | None) -> Iterator[WantedProcess]:
    """Yield processes for a node; a lost one never again as the same incarnation.

    On a node that is being drained these are only members of the view: no process starts there.
    """
    for worker in roster.workers_on(name):
        slot = roster.slots[worker]
        if slot.respawn_at is not None:
            continue
        acts = view is not None and view.includes(worker, slot.incarnation)
        if acts or not roster.drained_node(worker):
            yield from _list_processes(roster, worker, slot.incarnation, name)


def list_finishing(roster: Roster, name: AgentId, view: View | None) -> Iterator[WantedProcess]:
    """Yield processes that may finish on a node as the job ends: living members of the view.

    A member that promised before it had the state can never get it any more.
    """
    for worker in roster.workers_on(name):
        member = view.member(worker) if view is not None else None
        if view is None or member is None or roster.is_dead(worker, member.incarnation):
            continue
        status = roster.status(worker, member.incarnation)
        stranded = status and status.promised >= view.number and not status.has_state
        if not stranded:
            yield from _list_processes(roster, worker, member.incarnation, name)


def _list_processes(
    roster: Roster, worker: WorkerId, incarnation: Incarnation, name: AgentId
) -> Iterator[WantedProcess]:
    """Yield a worker's process for a node; for further nodes, once the first one's runs."""
    slot, status = roster.slots[worker], roster.status(worker, incarnation)
    meets_at = status.meets_at if status is not None and name != slot.agent else ""
    if name == slot.agent or meets_at:
        yield WantedProcess(
            worker=worker,
            incarnation=incarnation,
            role=slot.role,
            place=slot.nodes.index(name),
            meets_at=meets_at,
        )
