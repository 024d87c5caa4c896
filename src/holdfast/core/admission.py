"""Which nodes take part: each gets the places that it offers, up to a number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.formation import Situation
from holdfast.core.types import AgentId


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """What has been said about nodes; compared with what is, it tells what to say next."""

    waiting: tuple[AgentId, ...] = ()  # over the number: they get no places yet
    silent: tuple[AgentId, ...] = ()


def admit(situation: Situation, nodes_max: int) -> tuple[tuple[AgentId, ...], list[str]]:
    """Give nodes their places; a node that is lost for good makes room for one that waits.

    Returns the nodes that have to wait, and a line for each exchange.
    """
    roster = situation.roster
    acting = {m.agent for m in situation.members if not situation.abandoned(m)}
    placed = [name for name in roster.nodes if roster.here(name)]
    waiting: list[AgentId] = []
    lines: list[str] = []
    for name, node in roster.nodes.items():
        if node.offered <= len(roster.here(name)) or situation.silent(name):
            continue
        if name not in placed and len(placed) >= nodes_max:
            lost = [n for n in placed if n not in acting and situation.silent(n)]
            if not lost:
                waiting.append(name)
                continue
            roster.dismiss(lost[0])
            placed.remove(lost[0])
            lines.append(f"node {name} takes the place of node {lost[0]}")
        if name not in placed:
            placed.append(name)
        roster.admit(name)
    return tuple(waiting), lines


def attend(
    situation: Situation, waiting: tuple[AgentId, ...], before: Attendance
) -> tuple[Attendance, Iterator[tuple[str, str]]]:
    """The attendance now, and what is new about it: kinds and lines for the job's story."""
    nodes = situation.roster.nodes
    silent = tuple(sorted(name for name in nodes if situation.silent(name)))
    now = Attendance(waiting=waiting, silent=silent)

    def news() -> Iterator[tuple[str, str]]:
        for name in (n for n in waiting if n not in before.waiting):
            yield "node", f"node {name} waits: the job has all the nodes it may have"
        for name in (n for n in silent if n not in before.silent):
            yield "silent", f"node {name} is silent"
        for name in (n for n in before.silent if n not in silent):
            yield "node", f"node {name} is heard again"

    return now, news()
