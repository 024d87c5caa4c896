"""Planted bugs of feeding workers while others train, and of letting them join by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from holdfast.core.membership import view_making
from holdfast.core.membership.followers import Followers
from holdfast.core.membership.formation import Situation
from holdfast.core.membership.roster import Roster
from holdfast.core.membership.view_making import Proposal
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.core.step.events import Row
from holdfast.core.step.feeding import Feeding
from holdfast.core.step.following import Following
from holdfast.core.step.newcomers import Newcomers
from holdfast.core.step.step_machine import StepMachine
from holdfast.core.step.worker import WorkerMachine
from holdfast.core.types import Follower, View, WorkerId
from holdfast.sim.world import Machines
from mutation_kit import mutation


@mutation
def the_first_step_is_not_fed(patch: pytest.MonkeyPatch) -> Machines:
    """What follows the copied state begins one step too late."""

    plain = Feeding.committed

    def committed(self: Feeding, step: int) -> list[ef.Outcome]:
        return plain(self, step) if step != self._base else []

    patch.setattr(Feeding, "committed", committed)
    return Machines()


@mutation
def members_copy_at_different_boundaries(patch: pytest.MonkeyPatch) -> Machines:
    plain = WorkerMachine._copies

    class Odd(WorkerMachine):
        def _copies(self, made: int, *, within: bool) -> Sequence[ef.Outcome]:
            step = self._status.committed
            late = self._status.worker % 2 and self._step.feeding._due == step
            return plain(self, 2 if late else made, within=within)

    return Machines(worker=Odd)


@mutation
def who_is_fed_joins_before_it_has_every_step(patch: pytest.MonkeyPatch) -> Machines:
    plain = StepMachine._agreed

    def agreed(self: StepMachine, rows: Sequence[Row]) -> list[ef.Outcome]:
        self.step = max(self.step, self._view.resume_step)
        return plain(self, rows)

    patch.setattr(StepMachine, "_agreed", agreed)
    return Machines()


@mutation
def who_is_fed_is_not_waited_for_until_all_was_compared(patch: pytest.MonkeyPatch) -> Machines:
    """A wrong part of a member's state is copied, and two outvote the one that is right."""
    plain = Following.__init__
    patch.setattr(Following, "__init__", lambda self, *, compares: plain(self, compares=False))
    return Machines()


@mutation
def copies_count_as_compared_although_they_differ(patch: pytest.MonkeyPatch) -> Machines:
    """Members go on with copies that differ, and only the next cycle tells them so."""
    plain = StepMachine.summed

    def summed(self: StepMachine, event: ev.Summed) -> list[ef.Outcome]:
        alike = tuple(copy and 1 for copy in event.copies)
        return plain(self, dataclasses.replace(event, copies=alike))

    patch.setattr(StepMachine, "summed", summed)
    return Machines()


@mutation
def who_was_fed_is_proved_before_its_first_task(patch: pytest.MonkeyPatch) -> Machines:
    def watched(self: Newcomers, view: View) -> frozenset[WorkerId]:
        return frozenset() if view.fed else frozenset(view.unproven)

    patch.setattr(Newcomers, "watched", watched)
    return Machines()


@mutation
def a_view_without_tasks_for_who_was_fed_proves_it(patch: pytest.MonkeyPatch) -> Machines:
    def unproven(proposal: Proposal, old: View | None, roster: Roster) -> tuple[WorkerId, ...]:
        found = proposal.joiners
        return tuple(sorted(found)) if len(found) < len(proposal.workers) else ()

    patch.setattr(view_making, "_unproven", unproven)
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
    """Nobody is ever taken for fed: each joins in a pause, and what was fed is thrown away."""

    def abreast(self: Followers, situation: Situation) -> tuple[Follower, ...]:
        return ()

    patch.setattr(Followers, "abreast", abreast)
    return Machines()
