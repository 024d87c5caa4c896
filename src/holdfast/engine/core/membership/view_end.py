"""Decides how the present view ends: at once, or as planned, at a boundary between steps. Pure.

Some planned changes end all workers that hold the state, because each holds a share, or because the
only worker loses one of its nodes. They begin again from the nodes' memory. Where a checkpoint is
the only other copy of the state, the view ends at a boundary whose state is saved, and the workers
rest there until the checkpoint is durable, so that the change costs no step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.formation import (
    choose_change,
    find_too_far_behind,
    survivors_of,
)
from holdfast.engine.core.membership.handover import Handover
from holdfast.engine.core.membership.job_changes import CoordinatorChange, PlanChange, Remember
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.membership.restart import replace_all
from holdfast.engine.core.membership.teams import end_team, find_team_to_end
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.core.worker_status import Phase, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEnd:
    """Keeps the orders: the newest view that was stopped, and the newest one with a planned end.

    `saved`: the planned end comes at a boundary whose state is saved.
    """

    stopped: ViewNumber = NO_VIEW
    planned: ViewNumber = NO_VIEW
    saved: bool = False

    def is_decided(self, number: ViewNumber) -> bool:
        """Return whether the end of this view is decided, or that of a later one."""
        return max(self.stopped, self.planned) >= number

    def stop(self, number: ViewNumber) -> ViewEnd:
        """Return the orders once a view is stopped as well."""
        return dataclasses.replace(self, stopped=number)

    def plan(self, change: PlanChange) -> ViewEnd:
        """Return the orders once the end of a view is planned as well."""
        return dataclasses.replace(self, planned=change.view, saved=change.saved)


def plan_change(
    facts: Facts, end: ViewEnd, policy: CoordinatorPolicy, handover: Handover, step: int
) -> list[CoordinatorChange]:
    """Plan a change at the next boundary: a worker can join, one leaves, or too few are left."""
    view = facts.view
    if view is None or end.is_decided(view.number):
        return []
    found = find_too_far_behind(facts, step)
    plan: list[CoordinatorChange] = [
        *replace_all(found, "it was suspended and has missed too many steps")
    ]
    change = choose_change(facts, policy.workers_min, step)
    ends_all = not policy.replicated
    if change is None and _has_store_only(policy) and (team := find_team_to_end(facts)):
        name = next(name for name in team if facts.roster.draining(name))
        change = "drain", f"node {name} is left ({facts.roster.draining(name)})"
        ends_all = True
    may_change = handover.may_end or not ends_all
    if change is not None and may_change and not any(status.ended for status in facts.known):
        text = f"{change[1]} at the next step boundary"
        saved = ends_all and _has_store_only(policy)
        plan += [PlanChange(view.number, saved), Announce(change[0], text)]
    return plan


def plan_handover(
    facts: Facts,
    policy: CoordinatorPolicy,
    handover: Handover,
    protection: Protection,
    durable: Durable,
) -> list[CoordinatorChange]:
    """Keep nodes that leave for as long as they are needed; end workers that have to be ended."""
    team = find_team_to_end(facts)
    changes = not policy.replicated and choose_change(facts, policy.workers_min, 0) is not None
    reviewed, lines = handover.review(facts, protection, durable, bool(team) or changes)
    may_end = reviewed.may_end
    if _has_store_only(policy):
        rest = survivors_of(facts) is not None
        may_end = may_end and rest and not awaits_last_save(facts, policy)
    end = end_team(facts, team) if team and may_end else []
    return [Remember(reviewed), *lines, *end]


def awaits_last_save(facts: Facts, policy: CoordinatorPolicy) -> bool:
    """Return whether the members rest at the end of their view until its state is saved.

    The first member learns when the whole checkpoint is durable. They do not wait if a member is
    gone before its share is written, or for longer than a hang takes.
    """
    first = facts.status(facts.members[0]) if facts.members else None
    step = first.saving if first is not None else 0
    if not step or facts.now >= facts.roster.moved_at + policy.hang_s:
        return False
    rest = [(facts.is_sound(member), facts.status(member)) for member in facts.members]
    return all(is_sound or _has_saved(status, step) for is_sound, status in rest)


def _has_saved(status: WorkerStatus | None, step: int) -> bool:
    """Return whether a process has rested at this step, and has written its share of the state."""
    if status is None or status.phase is not Phase.BOUNDARY:
        return False
    return status.committed == step and not status.saving


def _has_store_only(policy: CoordinatorPolicy) -> bool:
    """Return whether checkpoints are the only copies of the state outside of workers."""
    return policy.keeps and not policy.redundancy.data
