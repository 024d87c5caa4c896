"""Decides when the present view must stop, and what the next view contains. Pure.

These functions remember no state and change none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from holdfast.engine.core.assignment import assign_mid_step
from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.membership.changes import OrderNext
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts, is_given_up
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.view_making import (
    Proposal,
    choose_hosts,
    choose_owners,
    find_worker_paths,
    resume_step,
)
from holdfast.engine.core.types import NO_VIEW, AgentId, WorkerId, name_workers, say_of_workers
from holdfast.engine.core.views import Follower, LateWorker, View
from holdfast.engine.core.worker_status import Stage, WorkerStatus

QUARANTINED_S = 10.0  # workers quarantined for longer are not waited for
LEAVE_RESERVE_S = 2.0  # a node that is gone so soon is left although a worker is still being fed
STEPS_MISSED_MAX = 64  # steps that a worker may miss and still catch up


class BasisOfView(enum.Enum):
    """Names the source of the job's state for the next view."""

    #: A member may still act.
    UNKNOWN = "unknown"
    #: Silent members may hold the state: wait until it is given up, or recalled.
    AWAITED = "awaited"
    SURVIVORS = "survivors"
    #: The job finishes.
    LAST_SURVIVORS = "last survivors"
    #: From a checkpoint, because the survivors' state is wrong.
    DISCARDED = "discarded"
    #: From a checkpoint or the nodes' memory, because no worker holds the state.
    RECALLED = "recalled"


def candidates(facts: Facts) -> Sequence[WorkerStatus]:
    """Find workers that could join a view: they are ready, wanted and lack the job's state."""
    return facts.find_once(_find_candidates)


def _find_candidates(facts: Facts) -> Sequence[WorkerStatus]:
    return [s for s in _find_ready(facts) if not facts.roster.drained_node(s.worker)]


def _find_ready(facts: Facts) -> Sequence[WorkerStatus]:
    """Find workers that could join a view, also on nodes that are to be left."""
    view, roster = facts.view, facts.roster
    found = []
    ready = [s for s in roster.newest.values() if s.stage == Stage.READY and not s.has_state]
    for status in sorted(ready, key=lambda s: s.worker):
        worker = status.worker
        if not roster.is_ordered(status):
            continue
        if view is not None and view.includes(worker, status.incarnation):
            if status.promised < view.number:
                continue
        silent = any(name in facts.silent for name in roster.slots[worker].nodes)
        # A worker that began to catch up and had to stop may be anywhere between two steps.
        if not silent and not status.committed:
            found += [status] if roster.is_complete(status) else []
    moves = any(node.report.leaving for node in roster.nodes.values())
    if moves:  # a worker on a node to which another one is to be moved comes first
        found.sort(key=lambda s: not roster.awaits_worker(roster.slots[s.worker].agent))
    return found


def joiners_in_a_pause(facts: Facts) -> list[WorkerStatus]:
    """Find candidates that no member feeds while it trains."""
    return [s for s in candidates(facts) if s.worker not in facts.waiting_for]


def _is_anyone_leaving(roster: Roster) -> bool:
    """Return whether any node is drained, or any worker is to be moved."""
    return any(node.draining or node.report.leaving for node in roster.nodes.values())


def room_beside_drained(facts: Facts) -> int:
    """Return the number of further members that fit once members on drained nodes have left."""
    roster, stay = facts.roster, len(facts.members)
    if _is_anyone_leaving(roster):
        stay = sum(not roster.reason_to_leave(member.worker) for member in facts.members)
    late = facts.view.suspended if facts.view is not None else ()
    return max(facts.room.members - stay - len(late), 0)


def find_returning(facts: Facts, step: int) -> list[LateWorker]:
    """Find suspended workers that are done with what made them late and can still catch up."""
    view, roster, found = facts.view, facts.roster, []
    for lag in view.suspended if view is not None else ():
        status = roster.status(lag.worker, lag.incarnation)
        if (
            status is None
            or not roster.is_ordered(status)
            or step - lag.committed > STEPS_MISSED_MAX
        ):
            continue
        silent = any(name in facts.silent for name in roster.slots[lag.worker].nodes)
        done = status.waiting or status.at_boundary
        ready = status.stage == Stage.READY and status.has_state and done
        if ready and not silent and not roster.drained_node(lag.worker):
            found.append(lag)
    return found


def find_too_far_behind(facts: Facts, step: int) -> list[WorkerStatus]:
    """Find suspended workers that have missed so much that a new process would be sooner there."""
    view, roster = facts.view, facts.roster
    lags = view.suspended if view is not None else ()
    found = [
        roster.status(g.worker, g.incarnation)
        for g in lags
        if step - g.committed > STEPS_MISSED_MAX
    ]
    return [s for s in found if s is not None and s.stage.alive and roster.is_ordered(s)]


def workers_to_suspend(survivors: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    """Return the workers to suspend: all within a task, if at least as many members wait."""
    newest = max(s.committed for s in survivors)
    waiting = [s for s in survivors if s.waiting or s.reduced]
    found = [s for s in survivors if s.in_step and not (s.waiting or s.reduced)]
    same_step = all(s.committed == newest for s in survivors)
    some_say_so = any(s.late for s in waiting)
    return found if same_step and some_say_so and len(found) <= len(waiting) else []


def say_who_is_late(late: Sequence[WorkerStatus], step: int) -> str:
    """Return the text that these workers are suspended, and why."""
    one, several = f"is late in step {step} and is", f"are late in step {step} and are"
    return f"{say_of_workers([status.worker for status in late], one, several)} suspended"


def is_surely_newest(facts: Facts) -> bool:
    """Return whether no later view than this one can exist, according to its members' reports.

    A later view would need a member of this one that takes part in it, or has died since.
    """
    known = [facts.status(m) for m in facts.members]
    well = [s is not None and (s.stage.alive or s.stage == Stage.EXITED) for s in known]
    return bool(well) and all(well)


def has_learnt(facts: Facts, learn_until: float) -> bool:
    """Return whether all parts of a lost record that may still come from the agents are here."""
    number = facts.view.number if facts.view is not None else NO_VIEW
    heard = (node for name, node in facts.roster.nodes.items() if name not in facts.silent)
    if any(node.report.view_known > number for node in heard):
        return False
    lease = facts.lease
    given_up_at = facts.roster.started_at + lease.abandon_s + lease.margin_s
    return facts.now >= (learn_until if is_surely_newest(facts) else given_up_at)


def choose_leavers(
    facts: Facts, workers: Sequence[WorkerId], workers_min: int
) -> dict[WorkerId, str]:
    """Find which of these members should leave, and why.

    All members on a drained node leave in any case. A member that only moves stays while too few
    other members would remain.
    """
    roster = facts.roster
    if not _is_anyone_leaving(roster):
        return {}
    why = {worker: reason for worker in workers if (reason := roster.reason_to_leave(worker))}
    found = {w: reason for w, reason in why.items() if roster.drained_node(w)}
    spared = len(workers) - len(found) + len(candidates(facts)) - workers_min
    moved = [worker for worker in why if worker not in found]
    return found | {worker: why[worker] for worker in moved[: max(spared, 0)]}


def find_leaving(facts: Facts, workers_min: int) -> dict[str, str]:
    """Find workers and nodes to be left at the next boundary, with reasons, if enough members stay.

    Workers that are being fed are waited for: they take the places of leaving workers, if these
    have the time.
    """
    roster, workers = facts.roster, [m.worker for m in facts.members]
    found = choose_leavers(facts, workers, workers_min)
    if not found or (len(found) == len(workers) and not candidates(facts)):
        return {}
    agents = {w: roster.drained_node(w) or roster.slots[w].agent for w in found}
    until = min(roster.nodes[agent].leave_by for agent in agents.values())
    if facts.feeding and facts.now < until - LEAVE_RESERVE_S:
        return {}
    return {
        f"node {agents[w]}" if roster.draining(agents[w]) else f"worker {w}": reason
        for w, reason in found.items()
    }


def reason_to_stop(
    facts: Facts, waited_s: float, patience_s: float, minds_late: bool = False
) -> str | None:
    """Return the reason to stop the present view; None if it may continue.

    `waited_s`: the time without any progress while a member waits for other members. `minds_late`:
    other members may compute the tasks of late workers.
    """
    view = facts.view
    if view is None:
        return None
    reason = None
    stopped = waiting = False
    silent: list[AgentId] = []
    for member in view.members:
        status = facts.status(member)
        if facts.is_fenced(member):
            reason = f"worker {member.worker} is gone"
        elif name := facts.find_silent_node(member):
            silent.append(name)
        elif status is None:
            continue
        elif status.discarded:
            reason = reason or f"worker {member.worker} knows that something wrong was used"
        elif status.promised < view.number:
            waiting = waiting or status.waiting
            if status.late and minds_late and not facts.has_no_room():
                reason = reason or f"worker {member.worker} waits for {_name_late(facts)}"
        elif status.at_boundary and status.committed > view.resume_step:
            stopped = True  # a planned change, if all other members stop, too
        else:
            why = status.left_for or "has left it"
            reason = reason or f"worker {member.worker} {why}"
    if silent and len(silent) < len(view.members):
        reason = reason or f"node {silent[0]} has not been heard for a while"
    if stopped and waiting and waited_s >= patience_s:
        reason = reason or "a worker waits for one that has stopped"
    return reason


def _name_late(facts: Facts) -> str:
    """Name the members that are still at their tasks while another one waits for them."""
    known = [facts.status(member) for member in facts.members]
    late = [s.worker for s in known if s is not None and s.in_step and not s.waiting]
    if not late:
        return "one that is late"
    return f"{name_workers(late)}, which {'is' if len(late) == 1 else 'are'} late"


def choose_change(facts: Facts, workers_min: int, step: int) -> tuple[str, str] | None:
    """Choose a planned change of the view: its kind and its text. None if all is well."""
    members = len(facts.members)
    room = members < facts.room.members
    joiners = joiners_in_a_pause(facts) if room else []
    back = find_returning(facts, step) if room else []
    if members >= workers_min:
        back = [lag for lag in back if lag.worker not in facts.held_back]
    fed = facts.caught_up if room_beside_drained(facts) else ()
    joining = _names(joiners, back, fed)
    left = find_leaving(facts, workers_min)
    if joining:
        return "join", say_of_workers(joining, "joins", "join")
    if left:
        who, why = min(left.items())
        return "drain", f"{who} is left ({why})"
    return ("wait", "the job waits") if members < workers_min else None


def survivors_of(facts: Facts) -> Sequence[WorkerStatus] | None:
    """Return the members that hold the state and can continue; None while any may still act."""
    return facts.find_once(_find_survivors)


def _find_survivors(facts: Facts) -> Sequence[WorkerStatus] | None:
    view, roster = facts.view, facts.roster
    alive: list[WorkerStatus] = []
    for member in facts.members:
        if facts.is_fenced(member):
            continue
        status = facts.status(member)
        if status is None or view is None or status.promised < view.number:
            return None
        if facts.find_silent_node(member):
            return None
        # A worker that should catch up, and has not begun to, holds the state of an older step.
        behind = view.is_late(member.worker) and status.view < view.number
        if roster.is_ordered(status) and not behind:  # else its agent will end it
            alive.append(status)
    return [s for s in alive if s.has_state]


def choose_unreachable(facts: Facts) -> list[WorkerId]:
    """Choose members to leave out so that the rest reach each other: few, best not the leader.

    Each member names the members that its network does not reach. Joiners are chosen first, then
    members that are in most of these pairs, then a member of a node with fewer members.
    """
    view = facts.view
    if view is None:
        return []
    present = [m for m in view.members if not facts.is_fenced(m)]
    names = {m.worker for m in present}
    pairs: list[tuple[WorkerId, WorkerId]] = []
    for member in present:
        status = facts.status(member)
        for other in status.unreached if status is not None and status.view == view.number else ():
            if other in names:
                pairs.append((member.worker, other))
    left_out: list[WorkerId] = []
    while pairs:
        worst = max(
            (m for m in present if any(m.worker in pair for pair in pairs)),
            key=lambda m: (
                m.worker in view.joiners,  # so that the last holder of the state always stays
                sum(m.worker in pair for pair in pairs),
                m.worker != view.leader,
                -sum(other.agent == m.agent for other in present),
                m.worker,
            ),
        )
        left_out.append(worst.worker)
        pairs = [pair for pair in pairs if worst.worker not in pair]
    return left_out


def propose_view(
    facts: Facts,
    survivors: Sequence[WorkerStatus],
    workers_min: int,
    minds_late: bool = False,
) -> Proposal | None:
    """Propose the view of these survivors, with joiners if all are at rest; None to wait for more.

    `minds_late`: late workers may be suspended.
    """
    view = facts.view
    assert view is not None
    owners_now = present_owners(view, survivors)
    step, why = _resume_step(facts, view, survivors)
    at_rest = all(s.at_boundary for s in survivors)
    everyone = [s.worker for s in survivors]
    drained = list(choose_leavers(facts, everyone, workers_min))
    kept = [worker for worker in everyone if worker not in drained]
    most = facts.room.members
    room = max(most - len(kept), 0)
    back = find_returning(facts, step)[:room] if at_rest and len(kept) == len(survivors) else []
    if not _have_all_kept(view, kept):
        back = []
    # A fed worker needs all its feeders, and joins alone, so that no other joiner waits for it. The
    # members whose places it takes leave in the next view, when it can host their tasks.
    fed = facts.caught_up[:room] if at_rest and not back else ()
    if fed and _have_all_kept(view, everyone):
        kept = everyone
    else:
        fed = ()
    enough = len(kept) + len(back) + len(fed) >= max(workers_min, 1)
    find = joiners_in_a_pause if enough else candidates
    joiners = find(facts)[: room - len(back)] if at_rest and not fed else []
    late = workers_to_suspend(survivors) if minds_late and not at_rest else []
    if not at_rest or not kept:
        # A node is left only while no step is under way, and after a view in which other members
        # have received its state.
        kept = [s.worker for s in survivors if s not in late]
        joiners, back, fed = joiners[: max(most - len(kept), 0)], [], ()
    if at_rest and len(kept) + len(joiners) + len(back) + len(fed) < workers_min:
        return None
    joining = sorted(_names(joiners, back, fed))
    members = sorted([*kept, *joining])
    if at_rest:
        arriving = [each.worker for each in fed]
        paths = find_worker_paths(members, facts.roster, view)
        hosts, owners = choose_owners(members, owners_now, facts.room, arriving, paths)
        if joining:
            why = say_of_workers(joining, "joins", "join")
        elif len(kept) < len(survivors):
            why = say_of_workers(drained, "leaves", "leave")
    else:
        hosts = choose_hosts(kept, owners_now, facts.room)
        owners = assign_mid_step(hosts, owners_now, view.paths)
    if late:
        why = say_who_is_late(late, step)
    return Proposal(
        workers=tuple(members),
        owners=owners,
        resume_step=step,
        joiners=tuple(joining),
        why=why,
        suspended=tuple(_late_worker(s) for s in late),
        catching_up=tuple(back),
        fed=fed,
        spares=tuple(worker for worker in members if worker not in hosts),
        redone=sum(len(s.hosted) for s in late),
    )


def _names(
    joiners: Sequence[WorkerStatus], back: Sequence[LateWorker], fed: Sequence[Follower]
) -> list[WorkerId]:
    names = [status.worker for status in joiners]
    return [*names, *(lag.worker for lag in back), *(follower.worker for follower in fed)]


def _resume_step(facts: Facts, view: View, survivors: Sequence[WorkerStatus]) -> tuple[int, str]:
    """Return the step at which the survivors continue, and the reason.

    Members that take no part any more count if they have committed a step that the survivors have
    yet to commit.
    """
    newest = max(s.committed for s in survivors)
    known = [s for s in facts.known if s.view == view.number]
    further = [s for s in known if s.has_state and s.committed > newest]
    return resume_step([*survivors, *further], lost=len(survivors) < len(view.members))


def _late_worker(status: WorkerStatus) -> LateWorker:
    return LateWorker(
        worker=status.worker, incarnation=status.incarnation, committed=status.committed
    )


def _have_all_kept(view: View, kept: Sequence[WorkerId]) -> bool:
    """Return whether all members that have kept a share of the steps since are still there."""
    return set(view.workers) <= set(kept)


def present_owners(view: View, survivors: Sequence[WorkerStatus]) -> tuple[WorkerId, ...]:
    """Return the hosts of the virtual ranks; survivors may have changed them since the view began.

    A survivor that is a step ahead has agreed last, and may have begun to compute.
    """
    owners = list(view.owners)
    for status in sorted(survivors, key=lambda s: (s.committed, s.worker)):
        for vrank in status.hosted if status.view == view.number else ():
            owners[vrank] = status.worker
    return tuple(owners)


def interrupted_members(facts: Facts) -> list[WorkerStatus]:
    """List members that had to stop while they caught up: they may be between any two steps."""
    view = facts.view
    late = _names([], view.catching_up, view.fed) if view is not None else []
    known = [s for s in facts.known if s.worker in late and s.stage == Stage.READY]
    return [s for s in known if s.dirty and s.has_stopped and facts.roster.is_ordered(s)]


def find_useless(facts: Facts, workers_min: int) -> list[tuple[WorkerStatus, str]]:
    """Find members that are of no use for the next view, while other members hold the state.

    If the job waits for more workers, workers on nodes to be left end: their nodes may be gone
    before new workers replace them.
    """
    found = [(s, "it had to stop while it caught up") for s in interrupted_members(facts)]
    survivors, drained = survivors_of(facts) or [], facts.roster.drained_node
    left = {s.worker: node for s in survivors if (node := drained(s.worker)) is not None}
    if 0 < len(left) < len(survivors) and propose_view(facts, survivors, workers_min) is None:
        found += [(s, f"node {left[s.worker]} is left") for s in survivors if s.worker in left]
    return found


def find_dirty(facts: Facts, replicated: bool) -> list[tuple[WorkerStatus, str]]:
    """Find candidates that must begin again, and why: their state is not the initial one.

    `replicated`: each worker holds the whole state, not only its share.
    """
    roster = facts.roster
    heard = [s for w, s in roster.newest.items() if roster.slots[w].agent not in facts.silent]
    ready = [s for s in heard if s.stage == Stage.READY and roster.is_ordered(s)]
    found = sorted((s for s in ready if s.dirty or s.has_state), key=lambda s: s.worker)
    why = "its state is neither initial nor the job's"
    share = "it holds its share of the state only"
    reasons = [share if s.has_state and not replicated else why for s in found]
    unsaved = [f"; step {s.saving} is not saved" if s.saving else "" for s in found]
    return [(s, why + more) for s, why, more in zip(found, reasons, unsaved, strict=True)]


def reason_to_begin_again(facts: Facts, known: Invalidations, replicated: bool) -> str:
    """Return the reason that a job which has begun before begins again; else an empty string.

    `known`: all invalidations. The present view ended because of the ones that it lacks.
    """
    if facts.view is None:
        return ""
    if known != facts.view.invalidations:
        return "the workers' states are given up"
    return "every worker was lost" if replicated else "all workers begin again, to share the state"


def is_state_discarded(facts: Facts) -> bool:
    """Return whether a worker reports that the states of the workers are discarded."""
    roster = facts.roster
    return any(s.discarded and roster.is_ordered(s) for s in roster.newest.values())


def find_state_source(
    facts: Facts, finishing: bool, replicated: bool, awaits: Callable[[], bool]
) -> BasisOfView:
    """Find the source of the next view's state, once no member can act in the present view.

    `finishing`: the job is past its last loop. `replicated`: each worker holds the whole state.
    `awaits`: returns whether silent members are waited for, because they may hold the state.
    """
    survivors = survivors_of(facts)
    if survivors is None:
        return BasisOfView.UNKNOWN
    if is_state_discarded(facts) and not finishing:
        return BasisOfView.DISCARDED
    if survivors and (finishing or replicated):
        return BasisOfView.LAST_SURVIVORS if finishing else BasisOfView.SURVIVORS
    if finishing:
        return BasisOfView.UNKNOWN
    return BasisOfView.AWAITED if awaits() else BasisOfView.RECALLED


def present_nodes(facts: Facts) -> int:
    roster = facts.roster
    return sum(1 for n in roster.nodes if roster.workers_on(n) and n not in facts.silent)


def choose_beginners(facts: Facts, nodes_min: int, workers_min: int | None) -> list[WorkerStatus]:
    """Choose the workers that begin the job, or begin it again: all, or `workers_min` of them.

    The result is empty while further workers are waited for. Silent nodes are not waited for where
    `nodes_min` other nodes are there or the job begins again: if they come back, their workers
    join. If all nodes are to be left, these are used until new ones are there.
    """
    roster, known, now = facts.roster, facts.roster.newest, facts.now
    there = [node for name, node in roster.nodes.items() if not is_given_up(facts, name)]
    find = _find_ready if all(node.draining for node in there) else candidates
    ready = [s for s in find(facts) if not s.dirty]
    again = facts.view is not None or present_nodes(facts) >= nodes_min
    gone = facts.silent if again else frozenset()
    soon = [
        worker
        for worker, slot in roster.slots.items()
        if (slot.respawn_at or now) <= now + QUARANTINED_S and not gone.intersection(slot.nodes)
    ]
    pending = [w for w in soon if w not in known or known[w].stage != Stage.EXITED]
    enough = len(ready) >= min(len(pending), facts.room.hosts)
    enough = enough or (workers_min is not None and len(ready) >= workers_min)
    return ready if enough else []


def propose_last_view(facts: Facts, survivors: Sequence[WorkerStatus]) -> Proposal:
    """Propose a view while the job finishes: no worker joins, and none is waited for."""
    view = facts.view
    assert view is not None
    step, why = _resume_step(facts, view, survivors)
    staying = sorted(s.worker for s in survivors)
    owners_now = present_owners(view, survivors)
    hosts = choose_hosts(staying, owners_now, facts.room)
    return Proposal(
        workers=tuple(staying),
        owners=assign_mid_step(hosts, owners_now, view.paths),
        resume_step=step,
        joiners=(),
        spares=tuple(worker for worker in staying if worker not in hosts),
        why=why,
    )


def replace_left_out(facts: Facts, proposal: Proposal) -> list[OrderNext | Announce]:
    """Return the changes for members and suspended members that the proposed view leaves out."""
    roster, old = facts.roster, facts.view
    staying = frozenset([*proposal.workers, *(lag.worker for lag in proposal.suspended)])
    plan: list[OrderNext | Announce] = []
    for member in facts.members:
        if member.worker not in staying and roster.wants(member.worker, member.incarnation):
            if reason := roster.reason_to_leave(member.worker):
                text = f"worker {member.worker} leaves: {reason}"
                plan.append(Announce("leave", text, member.worker))
            elif name := facts.find_silent_node(member):
                silent_s = facts.now - roster.heard_at(name)
                text = (
                    f"worker {member.worker} was lost: node {name} was silent for {silent_s:.1f} s"
                )
                plan.append(Announce("lost", text, member.worker, node=name))
            plan.append(OrderNext(member.worker))  # only a new incarnation may come back
    plan += [
        Announce("late", f"worker {lag.worker} is late in step {lag.committed}", lag.worker)
        for lag in proposal.suspended
        if facts.view is not None and facts.view.member(lag.worker) is not None
    ]
    for lag in old.suspended if old is not None else ():
        if lag not in proposal.catching_up and roster.wants(lag.worker, lag.incarnation):
            plan.append(OrderNext(lag.worker))  # the steps that it missed are dropped
    return plan
