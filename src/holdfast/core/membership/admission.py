"""Decides which nodes take part: up to a number, with the slots they offer, until drained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.job_spec import CoordinatorPolicy
from holdfast.core.membership.draining import choose_drains
from holdfast.core.membership.formation import Situation
from holdfast.core.membership.teams import admit_teams
from holdfast.core.types import AgentId


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Remembers what has been said about nodes; the difference to what is so now is news."""

    waiting: tuple[AgentId, ...] = ()  # over the number: they get no slots yet
    silent: tuple[AgentId, ...] = ()
    not_drained: str = ""  # why nodes that fail their checks are used on


def admit(situation: Situation, policy: CoordinatorPolicy) -> tuple[tuple[AgentId, ...], list[str]]:
    """Give nodes their slots; a node that is lost for good makes room for one that waits.

    Returns the nodes that have to wait, and a line for each exchange.
    """
    nodes_max = policy.nodes_max
    if policy.spread > 1:
        protected = policy.redundancy.data > 0
        return admit_teams(situation, nodes_max, policy.spread, protected=protected)
    roster = situation.roster
    for name in _beyond(situation, nodes_max):
        roster.dismiss(name)
    count = len(roster.placed)
    waiting: list[AgentId] = []
    lines: list[str] = []
    for name, node in roster.nodes.items():
        if node.wanted <= len(roster.here(name)) or name in situation.silent:
            continue
        if not roster.here(name):
            if count >= nodes_max:
                lost = _lost(situation)
                if lost is None:
                    waiting.append(name)
                    continue
                roster.dismiss(lost)
                count -= 1
                lines.append(f"node {name} takes the place of node {lost}")
            count += 1
        roster.admit(name)
    return tuple(waiting), lines


def _beyond(situation: Situation, nodes_max: int) -> list[AgentId]:
    """Find nodes without members that a coordinator has taken back after its record was lost."""
    placed = situation.roster.placed
    acting = {m.agent for m in situation.members}
    idle = [n for n in placed if n not in acting]
    return idle[: max(len(placed) - nodes_max, 0)]


def _lost(situation: Situation) -> AgentId | None:
    """Find a node with slots that is silent and none of whose members may still return."""
    with_slots = [n for n in situation.roster.placed if n in situation.silent]
    if not with_slots:
        return None
    acting = {m.agent for m in situation.members if not situation.abandoned(m)}
    return next((n for n in with_slots if n not in acting), None)


def choose_drained(situation: Situation) -> str:
    """Drain the nodes that should be; return why not all that ask for it.

    A node that a person asks to leave does. Of those that fail their checks, only a part is drained
    at any time (draining.py): many fail at once when something they share has failed.
    """
    roster = situation.roster
    nodes = {n: node for n, node in roster.nodes.items() if n not in situation.silent}
    if not any(node.asks or node.draining for node in nodes.values()):
        return ""
    failing = [
        (n, node.failing)
        for n, node in sorted(nodes.items(), key=lambda item: (not item[1].draining, item[0]))
        if roster.on(n) or not node.failing
    ]
    chosen, why_not = choose_drains(failing)
    for name, node in nodes.items():
        before, drained = node.draining, not node.failing or name in chosen
        node.draining = node.asks if drained else ""
        if node.draining and not before:
            roster.drain(name, situation.view)
    return why_not


def attend(
    situation: Situation, waiting: tuple[AgentId, ...], not_drained: str, before: Attendance
) -> tuple[Attendance, Iterator[tuple[str, str]]]:
    """Return the attendance now, and what is new: kinds and lines for the job's event log."""
    nodes = situation.roster.nodes
    silent = tuple(sorted(name for name in situation.silent if name in nodes))
    now = Attendance(waiting=waiting, silent=silent, not_drained=not_drained)

    def news() -> Iterator[tuple[str, str]]:
        for name in (n for n in waiting if n not in before.waiting):
            yield "node", f"node {name} waits: the job has all the nodes it may have or can use"
        for name in (n for n in silent if n not in before.silent):
            yield "silent", f"node {name} is silent"
        for name in (n for n in before.silent if n not in silent):
            yield "node", f"node {name} is heard again"
        if not_drained and not_drained != before.not_drained:
            yield "node", f"nodes that fail their checks are used on: {not_drained}"

    return now, news()
