"""Planted bugs of feeding workers while others train, and of letting them join by it."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.membership import view_making
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.followers import Followers
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.view_making import Proposal
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.feeding import Feeding, Following
from holdfast.engine.core.replica.replica import Replica
from holdfast.engine.core.step.newcomers import Newcomers
from holdfast.engine.core.step.step_machine import StepMachine
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import Follower, View
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation


@mutation
def the_first_step_is_not_fed(patch: pytest.MonkeyPatch) -> Machines:
    """The steps after the copied state begin one too late."""

    plain = Feeding.handle_commit

    def committed(self: Feeding, step: int) -> list[ef.Outcome]:
        return plain(self, step) if step != self._base else []

    patch.setattr(Feeding, "handle_commit", committed)
    return Machines()


@mutation
def a_follower_that_is_too_slow_is_fed_on(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Feeding, "fall_behind", lambda self, event: [])
    return Machines()


@mutation
def members_copy_at_different_boundaries(patch: pytest.MonkeyPatch) -> Machines:
    plain = Copies.copy_next

    def copy_next(self: Copies, done: SinkKind | None, *, within: bool) -> bool:
        standing = self._standing
        late = standing.me % 2 and self.feeding._due == standing.status.committed
        return plain(self, SinkKind.FOLLOWERS if late else done, within=within)

    patch.setattr(Copies, "copy_next", copy_next)
    return Machines()


@mutation
def who_is_fed_joins_before_it_has_every_step(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Replica, "awaits_fed_steps", lambda self: False)
    return Machines()


@mutation
def who_is_fed_is_not_waited_for_until_all_was_compared(patch: pytest.MonkeyPatch) -> Machines:
    """A wrong part of a member's state is copied, and two outvote the one that is right."""
    plain = Following.__init__

    def init(self: Following, standing: Standing, *, compares: bool) -> None:
        plain(self, standing, compares=False)

    patch.setattr(Following, "__init__", init)
    return Machines()


@mutation
def copies_count_as_compared_although_they_differ(patch: pytest.MonkeyPatch) -> Machines:
    """Members go on with copies that differ, and only the next cycle tells them so."""
    plain = StepMachine.handle_sums

    def summed(self: StepMachine, event: ev.Summed) -> None:
        alike = tuple(copy and 1 for copy in event.copies)
        plain(self, dataclasses.replace(event, copies=alike))

    patch.setattr(StepMachine, "handle_sums", summed)
    return Machines()


@mutation
def who_was_fed_is_proved_before_its_first_task(patch: pytest.MonkeyPatch) -> Machines:
    def watched(self: Newcomers, view: View) -> frozenset[WorkerId]:
        return frozenset() if view.fed else frozenset(view.unproven)

    patch.setattr(Newcomers, "watched_workers", watched)
    return Machines()


@mutation
def a_view_without_tasks_for_who_was_fed_proves_it(patch: pytest.MonkeyPatch) -> Machines:
    def unproven(proposal: Proposal, old: View | None, roster: Roster) -> tuple[WorkerId, ...]:
        found = proposal.joiners
        return tuple(sorted(found)) if len(found) < len(proposal.workers) else ()

    patch.setattr(view_making, "_find_unproven", unproven)
    return Machines()


@mutation
def who_has_yet_to_take_the_last_step_counts_as_a_survivor(
    patch: pytest.MonkeyPatch,
) -> Machines:
    plain = View.is_late
    patch.setattr(View, "is_late", lambda self, w: plain(self, w) and not self.feeds(w))
    return Machines()


@mutation
def all_wait_while_who_is_fed_receives_the_state_again(patch: pytest.MonkeyPatch) -> Machines:
    """No worker ever counts as fed: each joins in a pause, and the fed state is thrown away."""

    def caught_up(self: Followers, facts: Facts) -> tuple[Follower, ...]:
        return ()

    patch.setattr(Followers, "caught_up", caught_up)
    return Machines()
