"""Decides who is started again and when: losses are counted once, repeated ones spaced out.

A slot whose workers keep being lost, or cannot be reached by the others, is left empty for longer
each time (exponential back-off), and starts afresh after a clean probation. Works on the roster's
slots; every change comes with a line for the job's event log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.membership.formation import Situation, given_up_on
from holdfast.core.membership.roster import Roster, SlotState
from holdfast.core.types import Stage, WorkerId, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    losses_max: int = 30  # workers lost with no step committed in between: then the job gives up
    strikes_free: int = 2  # losses of one slot that are replaced at once
    backoff_s: float = 0.5  # after the first loss beyond these; doubled with each further one
    backoff_max_s: float = 30.0
    quarantine_s: float = 5.0  # for a worker that others cannot reach; doubled each time
    quarantine_max_s: float = 300.0
    wrong_s: float = 60.0  # for a worker that computes wrongly; doubled each time
    wrong_max_s: float = 86400.0
    probation_s: float = 60.0  # a member without a loss for this long starts afresh


def replace_lost(
    situation: Situation, policy: RestartPolicy, bridges: Callable[[], bool] = lambda: False
) -> Iterator[tuple[WorkerId, str]]:
    """Order the next incarnation of lost workers, when their back-off has passed.

    `bridges`: tells whether no step is lost even if nobody holds the state. Yields each newly
    counted loss: the worker, and why it was lost.
    """
    now, newest = situation.now, situation.roster.newest
    for worker, slot in situation.roster.slots.items():
        if slot.respawn_at is None:
            status = newest.get(worker)
            if status is not None and status.incarnation == slot.incarnation and not slot.strikes:
                if status.stage != Stage.LOST and not situation.silent.intersection(slot.nodes):
                    if not slot.further:
                        continue  # almost all are, almost always
            _end_probation(situation, worker, slot, policy)
            lost = _loss(situation, worker, slot)
            lost = lost or _loss_elsewhere(situation, worker, slot, bridges)
            if lost is None:
                continue
            slot.respawn_at = now
            if slot.counted < slot.incarnation:
                slot.counted = slot.incarnation
                slot.strikes += 1
                excess = slot.strikes - policy.strikes_free
                if excess > 0:
                    wait_s = _doubled(policy.backoff_s, excess, policy.backoff_max_s)
                    slot.respawn_at = now + wait_s
                yield worker, lost
        if now >= slot.respawn_at:
            situation.roster.order_anew(worker)


def hung(situation: Situation) -> list[WorkerStatus]:
    """Find members that others wait for, when nothing has moved for very long."""
    known = situation.known
    if not any(status.waiting and status.hosted for status in known):
        return []
    return [s for s in known if not s.waiting and not s.ended and s.stage.alive]


def quarantine(
    roster: Roster, worker: WorkerId, now: float, policy: RestartPolicy, *, wrong: bool = False
) -> float:
    """Quarantine a worker that others cannot reach or that is `wrong`; return for how long (s)."""
    slot = roster.slots[worker]
    slot.strikes += 1
    roster.order_anew(worker)  # its process is of no use: the state it holds grows old
    if wrong:  # its own loss may have been counted as a strike before or not
        slot.wrongs += 1
        wait_s = _doubled(policy.wrong_s, slot.wrongs, policy.wrong_max_s)
    else:
        wait_s = _doubled(policy.quarantine_s, slot.strikes, policy.quarantine_max_s)
    slot.respawn_at = now + wait_s
    return wait_s


def quarantine_wrong(
    situation: Situation, accused: Sequence[WorkerId], policy: RestartPolicy
) -> Iterator[tuple[WorkerId, str]]:
    """Quarantine those that compute wrongly; yield a line for each."""
    roster = situation.roster
    for worker in accused:
        if worker in roster.slots:
            wait_s = quarantine(roster, worker, situation.now, policy, wrong=True)
            yield worker, f"worker {worker} is left out for {wait_s:.3g} s: it computes wrongly"


def _doubled(first_s: float, times: int, most_s: float) -> float:
    return min(first_s * 2.0 ** min(times - 1, 20), most_s)


def _end_probation(
    situation: Situation, worker: WorkerId, slot: SlotState, policy: RestartPolicy
) -> None:
    view = situation.view
    if not slot.strikes or view is None or not view.includes(worker, slot.incarnation):
        slot.member_since = None
    elif slot.member_since is None:
        slot.member_since = situation.now
    elif situation.now - slot.member_since >= policy.probation_s:
        slot.strikes, slot.wrongs, slot.member_since = 0, 0, None


def _loss(situation: Situation, worker: WorkerId, slot: SlotState) -> str | None:
    """Tell why the ordered incarnation of `worker` is gone, or None while it is not."""
    node = situation.roster.nodes.get(slot.agent)
    member = situation.view.member(worker) if situation.view is not None else None
    if member is not None and member.incarnation != slot.incarnation:
        member = None
    if node is None or slot.agent in situation.silent:
        lost = member is not None and situation.abandoned(member)
        return "its node is lost" if lost else None
    status = node.statuses.get(worker)
    if status is None or status.incarnation < slot.incarnation:
        # Not started yet, or the agent itself restarted and its workers died with it.
        return "its agent restarted" if member is not None else None
    return status.detail or "gone" if status.stage == Stage.LOST else None


def _loss_elsewhere(
    situation: Situation, worker: WorkerId, slot: SlotState, bridges: Callable[[], bool]
) -> str | None:
    """Tell why a spread worker is gone since some of its processes are, or None while it is not.

    Once one of its nodes can act no more it can commit nothing, on whichever side of a cut. A
    silent node is waited for longer if that would cost steps.
    """
    roster, view = situation.roster, situation.view
    acts = view is not None and view.includes(worker, slot.incarnation)
    fence_s = situation.lease.fence_s
    for name in slot.nodes if slot.further else ():
        if name in situation.silent:
            fenced = acts and situation.now >= roster.heard_at(name) + fence_s
            if fenced and (
                given_up_on(situation, name) or _others_hold(situation, worker) or bridges()
            ):
                return f"its node {name} is lost"
            continue
        node = roster.nodes.get(name)
        status = node.statuses.get(worker) if node is not None else None
        if node is None or name == slot.agent:
            continue
        if status is None or status.incarnation < slot.incarnation:
            if acts:
                return f"the agent of its node {name} restarted"
        elif status.incarnation == slot.incarnation and status.stage == Stage.LOST:
            return f"on node {name}: {status.detail or 'gone'}"
    return None


def _others_hold(situation: Situation, worker: WorkerId) -> bool:
    """Tell whether other members can go on, with the state that they hold."""
    others = [m for m in situation.members if m.worker != worker and situation.sound(m)]
    found = [situation.status(member) for member in others]
    return any(status is not None and status.has_state for status in found)
