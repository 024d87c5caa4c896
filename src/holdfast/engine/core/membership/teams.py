"""Decides over which nodes workers are spread that need several: over teams of nodes. Pure.

All workers of a team have the same nodes in the same order, and each node runs the same shards
of each worker. A waiting node takes the place of a lost one in its team, so that the other
nodes keep their shards. A team changes only once none of its workers can act any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.membership.changes import AddSlot, Change, DismissNode, OrderNext
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.roster import SlotState
from holdfast.engine.core.types import AgentId

Team = tuple[AgentId, ...]


def admit_teams(
    facts: Facts, nodes_max: int, size: int
) -> tuple[tuple[AgentId, ...], list[Change]]:
    """Make teams of `size` nodes, and complete teams that have lost some.

    Returns the nodes that wait, and the plan.
    """
    roster, plan = facts.roster, list[Change]()
    waiting, teams = _choose_waiting(facts), _list_teams(facts)
    placed = len(roster.nodes_with_places)
    broken = [t for t in teams if _can_change(facts, t) and _is_known(facts, t)]
    while broken:
        team = broken.pop(0)
        lost = [name for name in team if _is_lost(facts, name)]
        while len(waiting) < len(lost) and broken:  # one whole team is more than two broken ones
            other = broken.pop()
            plan.append(DismissNode(other[0]))
            teams.remove(other)
            placed -= len(other)
            waiting += [name for name in other if not _is_lost(facts, name)]
        if len(waiting) < len(lost):
            break
        found = {name: waiting.pop(0) for name in lost}
        plan.append(DismissNode(team[0]))
        teams.remove(team)
        plan += _form_team(facts, [found.get(name, name) for name in team])
        for old, new in found.items():
            plan.append(Announce("node", f"node {new} takes the place of node {old}"))
    while len(waiting) >= size and placed + size <= nodes_max:
        team, waiting = tuple(waiting[:size]), waiting[size:]
        placed += size
        plan += _form_team(facts, team)
        text = f"workers are spread over the nodes {', '.join(team)}"
        plan.append(Announce("node", text))
    return tuple(waiting), plan


def _form_team(facts: Facts, names: Sequence[AgentId]) -> list[Change]:
    """Give nodes the slots of workers that are spread over them, in this order."""
    roster = facts.roster
    count = min(roster.nodes[name].processes_for for name in names)
    slot = SlotState(names[0], roster.first, further=tuple(names[1:]))
    return [AddSlot(slot)] * count


def find_team_to_end(facts: Facts) -> Team:
    """Find a team whose workers cannot leave a drained node otherwise; empty: there is none.

    No other worker holds the state, or will receive it. So these have to begin again, from the
    nodes' memory or a checkpoint, with a waiting node in place of the drained one.
    """
    roster, waiting = facts.roster, len(_choose_waiting(facts))
    for team in _list_teams(facts):
        drained = [name for name in team if roster.draining(name)]
        members = [m for m in facts.members if m.nodes == team]
        if not 0 < len(drained) <= waiting or not members:
            continue
        others = [m for m in facts.members if m.nodes != team and facts.is_sound(m)]
        if not any(roster.drained_node(m.worker) is None for m in others):
            return team if not _is_any_coming(facts) else ()
    return ()


def end_team(facts: Facts, team: Team) -> list[Change]:
    """End the workers of a team that has a drained node; they begin again without it."""
    roster, plan = facts.roster, list[Change]()
    drained = next(name for name in team if roster.draining(name))
    for member in facts.members:
        if member.nodes == team and roster.wants(member.worker, member.incarnation):
            plan.append(OrderNext(member.worker))
            text = (
                f"worker {member.worker} begins again without node {drained} "
                f"({roster.draining(drained)})"
            )
            plan.append(Announce("leave", text, member.worker))
    return plan


def _is_any_coming(facts: Facts) -> bool:
    """Return whether a worker without drained nodes has started, and will receive the state."""
    roster, view = facts.roster, facts.view
    for worker, slot in roster.slots.items():
        status = roster.status(worker, slot.incarnation)
        here = status is not None and status.stage.alive and not facts.silent & {*slot.nodes}
        acts = view is not None and view.includes(worker, slot.incarnation)
        if here and not acts and roster.drained_node(worker) is None:
            return True
    return False


def _list_teams(facts: Facts) -> list[Team]:
    slots = facts.roster.slots.values()
    return list(dict.fromkeys(slot.nodes for slot in slots))


def _is_known(facts: Facts, team: Team) -> bool:
    """Return whether every node of a team is lost, or has reported to this coordinator."""
    return all(name in facts.roster.nodes or _is_lost(facts, name) for name in team)


def _choose_waiting(facts: Facts) -> list[AgentId]:
    """Return nodes that could be in a team, in the order of their pieces of the job's state."""
    roster = facts.roster
    found = [
        name
        for name, node in roster.nodes.items()
        if node.processes_for and not roster.workers_on(name) and not _is_lost(facts, name)
    ]
    found = [name for name in found if name not in facts.silent]
    return sorted(found, key=lambda name: -len(roster.nodes[name].report.kept))


def _is_lost(facts: Facts, name: AgentId) -> bool:
    """Return whether a node's place may be taken: it can act no more, or is to be left."""
    roster = facts.roster
    heard_at = roster.heard_at(name)
    gone = name in facts.silent and facts.now >= heard_at + facts.lease.fence_s
    return gone or bool(roster.draining(name))


def _can_change(facts: Facts, team: Team) -> bool:
    """Return whether a team has lost nodes, and none of its workers acts any more."""
    return any(_is_lost(facts, name) for name in team) and not _acts(facts, team)


def _acts(facts: Facts, team: Team) -> bool:
    """Return whether a worker of this team may still act as a member of the view."""
    members = [m for m in facts.members if m.nodes == team]
    return not all(facts.is_abandoned(member) for member in members)
