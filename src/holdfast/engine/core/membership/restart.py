"""Decides which workers are restarted, and when: it counts each loss once, and spaces out repeats.

A slot whose workers keep being lost, or cannot be reached by other members, is left empty for
longer each time (exponential back-off), and starts afresh after a clean probation. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from holdfast.engine.core.membership.changes import Change, CountLoss, OrderNext, PutSlot
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts, is_given_up
from holdfast.engine.core.membership.machine_losses import MachineLoss
from holdfast.engine.core.membership.roster import SlotState
from holdfast.engine.core.policies import RestartPolicy
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus


def replace_lost(
    facts: Facts, policy: RestartPolicy, bridges: Callable[[], bool] = lambda: False
) -> list[Change]:
    """Order the next incarnation of lost workers, when their back-off has passed.

    `bridges`: returns whether no step is lost even if no worker holds the state. The plan counts
    each new loss.
    """
    roster, now, plan = facts.roster, facts.now, list[Change]()
    for worker, before in roster.slots.items():
        slot = before
        if slot.respawn_at is None:
            status = roster.newest.get(worker)
            if status is not None and status.incarnation == slot.incarnation and not slot.strikes:
                if status.stage != Stage.LOST and not facts.silent.intersection(slot.nodes):
                    if not slot.further:
                        continue  # almost all are, almost always
            slot = _end_probation(facts, worker, slot, policy)
            lost = _reason_of_loss(facts, worker, slot) or _reason_of_loss_elsewhere(
                facts, worker, slot, bridges
            )
            if lost is not None:
                machine = _find_machine_loss(facts, worker, slot)
                if slot.counted < slot.incarnation:
                    why = machine.describe() if machine else lost
                    plan.append(CountLoss(worker, why, machine, _is_announced(facts, slot)))
                slot = _slot_after_loss(slot, now, policy, machine)
        if slot.respawn_at is not None and now >= slot.respawn_at:
            slot = slot.order_next(roster.first)
        if slot is not before:
            plan.append(PutSlot(worker, slot))
    return plan


def _slot_after_loss(
    slot: SlotState, now: float, policy: RestartPolicy, machine: MachineLoss | None
) -> SlotState:
    """Return the slot of a lost worker: empty, until its back-off has passed.

    A fault of the machine itself takes longer to repair: a full disk stays full.
    """
    if slot.counted >= slot.incarnation:
        return dataclasses.replace(slot, respawn_at=now)
    strikes = slot.strikes + 1
    excess = strikes - policy.strikes_free
    first_s, most_s = policy.backoff_s, policy.backoff_max_s
    if machine is not None:
        first_s, most_s = policy.quarantine_s, policy.quarantine_max_s
    wait_s = _double_delay(first_s, excess, most_s) if excess > 0 else 0.0
    return dataclasses.replace(
        slot, counted=slot.incarnation, strikes=strikes, respawn_at=now + wait_s
    )


def find_hung(facts: Facts) -> list[WorkerStatus]:
    """Find members for which other members wait, when the job makes no progress for very long."""
    known = facts.known
    if not any(status.waiting and status.hosted for status in known):
        return []
    return [s for s in known if not s.waiting and not s.ended and s.stage.alive]


def replace_all(found: Sequence[WorkerStatus], reason: str) -> list[Change]:
    """Order the next incarnations of these workers at once, each with a line on the reason."""
    plan: list[Change] = []
    for worker in [status.worker for status in found]:
        text = f"worker {worker} is replaced: {reason}"
        plan += [OrderNext(worker), Announce("replaced", text, worker)]
    return plan


def quarantine(
    facts: Facts, worker: WorkerId, policy: RestartPolicy, *, wrong: bool = False
) -> list[Change]:
    """Quarantine a worker that members cannot reach, or that is `wrong`, with a line on it."""
    roster, before = facts.roster, facts.roster.slots[worker]
    strikes, wrongs = before.strikes + 1, before.wrongs + wrong
    if wrong:  # its own loss may have been counted as a strike before or not
        wait_s = _double_delay(policy.wrong_s, wrongs, policy.wrong_max_s)
        why = "it computes wrongly"
    else:
        wait_s = _double_delay(policy.quarantine_s, strikes, policy.quarantine_max_s)
        why = "the network does not reach it"
    slot = before.order_next(roster.first)  # its process is of no use: its state grows old
    slot = dataclasses.replace(slot, strikes=strikes, wrongs=wrongs, respawn_at=facts.now + wait_s)
    text = f"worker {worker} is left out for {wait_s:.3g} s: {why}"
    return [PutSlot(worker, slot), Announce("quarantined", text, worker)]


def quarantine_wrong(
    facts: Facts, accused: Sequence[WorkerId], policy: RestartPolicy
) -> list[Change]:
    """Quarantine the workers that compute wrongly and have a slot."""
    found = [worker for worker in accused if worker in facts.roster.slots]
    plans = (quarantine(facts, worker, policy, wrong=True) for worker in found)
    return [change for plan in plans for change in plan]


def _double_delay(first_s: float, times: int, most_s: float) -> float:
    return min(first_s * 2.0 ** min(times - 1, 20), most_s)


def _end_probation(
    facts: Facts, worker: WorkerId, slot: SlotState, policy: RestartPolicy
) -> SlotState:
    """Return the slot without its strikes, if its worker was a member for long enough."""
    view, since = facts.view, slot.member_since
    if not slot.strikes or view is None or not view.includes(worker, slot.incarnation):
        return slot if since is None else dataclasses.replace(slot, member_since=None)
    if since is None:
        return dataclasses.replace(slot, member_since=facts.now)
    if facts.now - since >= policy.probation_s:
        return dataclasses.replace(slot, strikes=0, wrongs=0, member_since=None)
    return slot


def _reason_of_loss(facts: Facts, worker: WorkerId, slot: SlotState) -> str | None:
    """Return the reason why the ordered incarnation of `worker` is gone; None while it is not."""
    node = facts.roster.nodes.get(slot.agent)
    member = facts.view.member(worker) if facts.view is not None else None
    if member is not None and member.incarnation != slot.incarnation:
        member = None
    if node is None or slot.agent in facts.silent:
        lost = member is not None and facts.is_abandoned(member)
        return f"node {slot.agent} is lost" if lost else None
    status = node.statuses.get(worker)
    if status is None or status.incarnation < slot.incarnation:
        # Not started yet, or the agent itself restarted and its workers died with it.
        return f"the agent of node {slot.agent} ended, and the worker with it" if member else None
    return status.detail or "gone" if status.stage == Stage.LOST else None


def _find_machine_loss(facts: Facts, worker: WorkerId, slot: SlotState) -> MachineLoss | None:
    """Return the error of its machine's own by which the ordered incarnation has ended, if any."""
    status = facts.roster.status(worker, slot.incarnation)
    if status is None or status.machine_error is None:
        return None
    return MachineLoss(error=status.machine_error, node=slot.agent, detail=status.detail)


def _is_announced(facts: Facts, slot: SlotState) -> bool:
    """Return whether a node of this worker is taken away at a known time."""
    nodes = (facts.roster.nodes.get(name) for name in slot.nodes)
    return any(node is not None and node.leave_by < float("inf") for node in nodes)


def _reason_of_loss_elsewhere(
    facts: Facts, worker: WorkerId, slot: SlotState, bridges: Callable[[], bool]
) -> str | None:
    """Return the reason for which a spread worker is gone; None while it is not.

    It is gone with some of its processes: once one of its nodes can act no more it can commit no
    step, on whichever side of a cut. A silent node is waited for longer if that would cost steps.
    """
    roster, view = facts.roster, facts.view
    acts = view is not None and view.includes(worker, slot.incarnation)
    fence_s = facts.lease.fence_s
    for name in slot.nodes if slot.further else ():
        if name in facts.silent:
            fenced = acts and facts.now >= roster.heard_at(name) + fence_s
            if fenced and (
                is_given_up(facts, name) or _can_others_go_on(facts, worker) or bridges()
            ):
                return f"node {name} is lost"
            continue
        node = roster.nodes.get(name)
        status = node.statuses.get(worker) if node is not None else None
        if node is None or name == slot.agent:
            continue
        if status is None or status.incarnation < slot.incarnation:
            if acts:
                return f"the agent of node {name} ended, and its processes there with it"
        elif status.incarnation == slot.incarnation and status.stage == Stage.LOST:
            return f"on node {name}: {status.detail or 'gone'}"
    return None


def _can_others_go_on(facts: Facts, worker: WorkerId) -> bool:
    """Return whether other members can continue, with the state that they hold."""
    others = [m for m in facts.members if m.worker != worker and facts.is_sound(m)]
    found = [facts.status(member) for member in others]
    return any(status is not None and status.has_state for status in found)
