"""Decides which nodes take part: up to a number, with the slots they offer, until drained. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.engine.core.membership.changes import (
    AddSlot,
    Change,
    DismissNode,
    NameWorkers,
    OrderNext,
    PutSlot,
    RosterChange,
    SetDrain,
    WelcomeNode,
)
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.roster import Roster, SlotState
from holdfast.engine.core.membership.teams import admit_teams
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Remembers which events of nodes were logged, to log only changes."""

    #: Nodes beyond the number: they get no slots yet.
    waiting: tuple[AgentId, ...] = ()
    silent: tuple[AgentId, ...] = ()
    #: The reason to keep nodes that fail their checks.
    not_drained: str = ""

    def tell_waiting(
        self, waiting: tuple[AgentId, ...], spread: int = 1
    ) -> tuple[Attendance, list[Announce]]:
        """Return this with the nodes that wait now, and lines on the new ones.

        `spread`: nodes over which each worker is spread.
        """
        why = "waits: the job has all the nodes it may have or can use"
        if len(waiting) < spread:
            why = f"waits for further nodes: each worker is spread over {spread}"
        known = frozenset(self.waiting)
        new = [name for name in waiting if name not in known]
        lines = [Announce("node", f"node {name} {why}") for name in new]
        return dataclasses.replace(self, waiting=waiting), lines

    def tell_silent(self, facts: Facts) -> tuple[Attendance, list[Announce]]:
        """Return this with the nodes that are silent now, and lines about changes."""
        silent = tuple(sorted(name for name in facts.silent if name in facts.roster.nodes))
        known, now = frozenset(self.silent), frozenset(silent)
        new = [name for name in silent if name not in known]
        back = [name for name in self.silent if name not in now]
        lines = [Announce("silent", f"node {name} is silent", node=name) for name in new]
        lines += [Announce("node", f"node {name} is heard again", node=name) for name in back]
        return dataclasses.replace(self, silent=silent), lines

    def tell_not_drained(self, why: str) -> tuple[Attendance, list[Announce]]:
        """Return this with why nodes that fail their checks are used on, and a line if new."""
        text = f"nodes that fail their checks are used on: {why}"
        lines = [Announce("node", text)] if why not in ("", self.not_drained) else []
        return dataclasses.replace(self, not_drained=why), lines


def welcome(facts: Facts, *, recall: bool) -> list[Change]:
    """Reconcile slots with the processes of new agents, unless their workers act in the view.

    `recall`: a coordinator whose record is lost may have ordered these processes.
    """
    roster, view, plan = facts.roster, facts.view, list[Change]()
    for name, node in roster.nodes.items():
        if not node.fresh:
            continue
        plan.append(WelcomeNode(name))
        if recall:
            plan += recall_slots(roster, name, node.statuses.values(), None)
        for worker in roster.workers_on(name):
            acting = view is not None and view.includes(worker, roster.slots[worker].incarnation)
            if worker not in node.statuses and not acting:
                plan.append(OrderNext(worker))
    return plan


def recall_slots(
    roster: Roster, name: AgentId, statuses: Collection[WorkerStatus], view: View | None
) -> list[RosterChange]:
    """Restore slots from an agent's processes and the view, since the record is lost."""
    found: dict[WorkerId, SlotState] = {}
    members = view.members if view is not None else ()
    places = [(m.worker, SlotState(m.agent, m.incarnation, further=m.further)) for m in members]
    # Only the view knows all nodes of a spread worker: its other nodes are not taken back.
    running = [(s.worker, SlotState(name, s.incarnation)) for s in statuses if not s.meets_at]
    for worker, place in [*places, *running]:
        slot = found.get(worker, roster.slots.get(worker))
        if slot is None:
            found[worker] = place
        elif slot.agent == place.agent and slot.incarnation < place.incarnation:
            found[worker] = dataclasses.replace(slot, incarnation=place.incarnation)
    named = max((s.worker + 1 for s in statuses), default=0)
    return [*(PutSlot(worker, slot) for worker, slot in found.items()), NameWorkers(named)]


def admit(facts: Facts, policy: CoordinatorPolicy) -> tuple[tuple[AgentId, ...], list[Change]]:
    """Give nodes their slots; a node that is lost for good makes room for a waiting one.

    A drained node does so as well: the job may need the other node before it can leave this one.
    Returns the nodes that have to wait, and the plan.
    """
    nodes_max = policy.nodes_max
    if policy.spread > 1:
        return admit_teams(facts, nodes_max, policy.spread)
    roster = facts.roster
    placed = {name: len(roster.workers_of(name)) for name in roster.nodes_with_places}
    staying = set(_list_staying(facts, placed))
    plan: list[Change] = []

    def dismiss(name: AgentId) -> None:
        del placed[name]
        staying.discard(name)
        plan.append(DismissNode(name))

    for name in _choose_beyond(facts, nodes_max):
        dismiss(name)
    waiting: list[AgentId] = []
    for name, node in roster.nodes.items():
        if node.processes_for <= placed.get(name, 0) or name in facts.silent:
            continue
        if name not in placed and len(staying) >= nodes_max:
            lost = _choose_lost(facts, [n for n in placed if n in staying])
            if lost is None:
                waiting.append(name)
                continue
            dismiss(lost)
            plan.append(Announce("node", f"node {name} takes the place of node {lost}"))
        count = node.processes_for - placed.get(name, 0)
        plan += [AddSlot(SlotState(name, roster.first)) for _ in range(count)]
        placed[name] = node.processes_for
        if not roster.draining(name):
            staying.add(name)
    return tuple(waiting), plan


def _choose_beyond(facts: Facts, nodes_max: int) -> list[AgentId]:
    """Choose nodes without members that a coordinator has taken back after its record was lost."""
    placed = facts.roster.nodes_with_places
    acting, staying = {m.agent for m in facts.members}, _list_staying(facts, placed)
    idle = [n for n in staying if n not in acting]
    return idle[: max(len(staying) - nodes_max, 0)]


def _list_staying(facts: Facts, placed: Iterable[AgentId]) -> list[AgentId]:
    """Return those of these nodes that are not drained."""
    return [name for name in placed if not facts.roster.draining(name)]


def _choose_lost(facts: Facts, nodes: Iterable[AgentId]) -> AgentId | None:
    """Choose one of these nodes that is silent and none of whose members may still return."""
    silent = [n for n in nodes if n in facts.silent]
    if not silent:
        return None
    acting = {m.agent for m in facts.members if not facts.is_abandoned(m)}
    return next((n for n in silent if n not in acting), None)


def drain(facts: Facts) -> tuple[str, list[Change]]:
    """Return the plan to drain nodes, and the reason why some are not drained.

    A node that a person asks to leave is drained. Of the nodes that fail their checks, only a part
    is drained at any time (`choose_drains`): many fail at once when something they share has
    failed.
    """
    roster, plan = facts.roster, list[Change]()
    nodes = {n: node for n, node in roster.nodes.items() if n not in facts.silent}
    if not any(node.report.draining or node.draining for node in nodes.values()):
        return "", plan
    failing = [
        (n, node.report.failing)
        for n, node in sorted(nodes.items(), key=lambda item: (not item[1].draining, item[0]))
        if roster.workers_on(n) or not node.report.failing
    ]
    chosen, why_not = choose_drains(failing)
    for name, node in nodes.items():
        drained = not node.report.failing or name in chosen
        reason = node.report.draining if drained else ""
        if reason != node.draining:
            plan.append(SetDrain(name, reason))
        if reason and not node.draining:
            plan += _replace_idle(facts, name)
    return why_not, plan


def _replace_idle(facts: Facts, name: AgentId) -> Iterator[Change]:
    """Replace the processes on a node that take no part; no process starts while it drains."""
    view = facts.view
    for worker in facts.roster.workers_on(name):
        if view is None or not view.includes(worker, facts.roster.slots[worker].incarnation):
            yield OrderNext(worker)


def choose_drains(
    failing: Sequence[tuple[str, str]], share_max: float = 0.25
) -> tuple[tuple[str, ...], str]:
    """Choose which nodes to drain; also return the reason why not more of them are drained.

    `failing`: all nodes in a stable order, each with the check that it fails, or "". At most
    `share_max` of the nodes are drained, but one of two or more. When more nodes than that fail the
    same check, they share the fault, for example of a file server: draining them all would end the
    job and repair no fault.
    """
    wanted = [(node, check) for node, check in failing if check]
    most = max(1, int(share_max * len(failing))) if len(failing) > 1 else 0
    counts = Counter(check for _, check in wanted)
    own = [node for node, check in wanted if counts[check] <= most]
    shared = [check for check, count in counts.items() if count > most]
    if shared:
        why = f"{shared[0]} fails on {counts[shared[0]]} of {len(failing)} nodes: it is shared"
    elif len(own) > most:
        why = f"at most {most} of {len(failing)} nodes at a time"
    else:
        why = ""
    return tuple(own[:most]), why
