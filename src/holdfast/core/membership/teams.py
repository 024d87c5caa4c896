"""Decides over which nodes workers are spread that need several: over teams of nodes. Pure.

All workers of a team have the same nodes in the same order, each of which runs the same shards of
each of them. A lost node's place in its team is taken by one that waits, so that the others hold
the shards that they held before. A team changes only once none of its workers can act any more.
"""

from __future__ import annotations

from holdfast.core.membership.formation import Situation
from holdfast.core.types import AgentId

Team = tuple[AgentId, ...]


def admit_teams(
    situation: Situation, nodes_max: int, size: int, *, protected: bool
) -> tuple[tuple[AgentId, ...], list[str]]:
    """Make teams of `size` nodes, and mend those that have lost some.

    `protected`: no step is lost with all who hold the state. Returns the nodes that wait, and a
    line for each team that was made or changed.
    """
    roster = situation.roster
    lines: list[str] = []
    waiting = _waiting(situation)
    broken = [team for team in _teams(situation) if _may_change(situation, team)]
    while broken:
        team = broken.pop(0)
        lost = [name for name in team if _is_lost(situation, name)]
        if any(name not in roster.nodes for name in team if name not in lost):
            continue
        while len(waiting) < len(lost) and broken:  # one whole team is more than two broken ones
            other = broken.pop()
            roster.dismiss(other[0])
            waiting += [name for name in other if not _is_lost(situation, name)]
        if len(waiting) < len(lost):
            break
        found = {name: waiting.pop(0) for name in lost}
        roster.dismiss(team[0])
        roster.admit_together([found.get(name, name) for name in team])
        lines += [f"node {new} takes the place of node {old}" for old, new in found.items()]
    while len(waiting) >= size and len(roster.placed) + size <= nodes_max:
        team, waiting = tuple(waiting[:size]), waiting[size:]
        roster.admit_together(team)
        lines.append(f"workers are spread over the nodes {', '.join(team)}")
    if protected:
        lines += _leave_drained(situation, len(waiting))
    return tuple(waiting), lines


def _leave_drained(situation: Situation, waiting: int) -> list[str]:
    """End workers that cannot leave a drained node otherwise: nobody else holds the state.

    They begin anew, from the nodes' memory, with one of so many that wait in its place.
    """
    roster, lines = situation.roster, []
    for team in _teams(situation):
        members = [m for m in situation.members if m.nodes == team]
        others = [m for m in situation.members if m.nodes != team and situation.sound(m)]
        drained = [name for name in team if roster.draining(name)]
        if not 0 < len(drained) <= waiting or others:
            continue
        for member in members:
            if roster.wants(member.worker, member.incarnation):
                roster.order_anew(member.worker)
                lines.append(
                    f"worker {member.worker} begins anew without node {drained[0]}, as the nodes' "
                    f"memory has it ({roster.draining(drained[0])})"
                )
    return lines


def _teams(situation: Situation) -> list[Team]:
    slots = situation.roster.slots.values()
    return list(dict.fromkeys(slot.nodes for slot in slots))


def _waiting(situation: Situation) -> list[AgentId]:
    """Return nodes that could be in a team: first those that hold most of the job's state."""
    roster = situation.roster
    found = [
        name
        for name, node in roster.nodes.items()
        if node.wanted and not roster.on(name) and not _is_lost(situation, name)
    ]
    found = [name for name in found if name not in situation.silent]
    return sorted(found, key=lambda name: -len(roster.nodes[name].kept))


def _is_lost(situation: Situation, name: AgentId) -> bool:
    """Tell whether a node's place may be taken: it can act no more, or is to be left."""
    roster = situation.roster
    heard_at = roster.heard_at(name)
    gone = name in situation.silent and situation.now >= heard_at + situation.lease.fence_s
    return gone or bool(roster.draining(name))


def _may_change(situation: Situation, team: Team) -> bool:
    """Tell whether a team has lost nodes, and none of its workers acts any more."""
    return any(_is_lost(situation, name) for name in team) and not _acts(situation, team)


def _acts(situation: Situation, team: Team) -> bool:
    """Tell whether a worker of this team may still act as a member of the view."""
    members = [m for m in situation.members if m.nodes == team]
    return not all(situation.abandoned(member) for member in members)
