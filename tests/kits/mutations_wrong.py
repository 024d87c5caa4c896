"""Planted bugs in finding a mistake, and in going back to the state before it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from holdfast.engine.core.membership import view_making
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.view_making import Proposal
from holdfast.engine.core.step import audit, audits, rulings
from holdfast.engine.core.step.audit import Court, Ruling, Sentence
from holdfast.engine.core.step.newcomers import Newcomers, Refusal
from holdfast.engine.core.step.rulings import Trust
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker.membership import Membership
from holdfast.engine.core.worker_status import ReplicaStage
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation


@mutation
def audits_prove_nothing(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Court, "rule", lambda self, *heard: Ruling(sentence=Sentence.USE))
    return Machines()


@mutation
def the_owner_is_always_right(patch: pytest.MonkeyPatch) -> Machines:
    def judge(digests: dict[WorkerId, int]) -> audit.Judgement:
        right = next(iter(digests.values()))
        wrong = tuple(worker for worker, digest in digests.items() if digest != right)
        return audit.Judgement(right=right, wrong=wrong)

    patch.setattr(audit, "judge", judge)
    return Machines()


@mutation
def a_joiner_vouches_for_all(patch: pytest.MonkeyPatch) -> Machines:
    plain = Trust.enter

    def enter(self: Trust, view: View, *, compared: bool) -> None:
        if view.joiners:
            self._seen.clear()
        plain(self, view, compared=compared)

    patch.setattr(Trust, "enter", enter)
    return Machines()


@mutation
def wrong_sums_are_kept(patch: pytest.MonkeyPatch) -> Machines:
    plain = Membership._disbelieve

    def disbelieve(self: Membership, doubted: Doubted) -> None:
        plain(self, dataclasses.replace(doubted, discarded=False))

    patch.setattr(Membership, "_disbelieve", disbelieve)
    return Machines()


@mutation
def a_discarded_state_is_begun_from(patch: pytest.MonkeyPatch) -> Machines:
    class Forgetful(WorkerMachine):
        def _handle_directive(self, directive: Any) -> None:
            if self._standing.status.discarded:
                self._standing.change(state=ReplicaStage.OBTAINING)
            super()._handle_directive(directive)

    return Machines(worker=Forgetful)


@mutation
def joiners_are_believed(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Newcomers, "watched_workers", lambda self, view: frozenset())
    return Machines()


@mutation
def each_member_plans_comparisons_of_its_own(patch: pytest.MonkeyPatch) -> Machines:
    plain, plans = audits.plan_early, itertools.count()

    def plan_early(view: View, step: int, owners: Any, cycle: int) -> tuple[audit.Audit, ...]:
        return plain(view, step + next(plans) % 2, owners, cycle)

    patch.setattr(audits, "plan_early", plan_early)
    return Machines()


@mutation
def two_workers_that_contradict_themselves_are_the_scripts_doing(
    patch: pytest.MonkeyPatch,
) -> Machines:
    """The script is blamed even where a majority agrees on the result."""
    plain = Court.rule

    def rule(self: Court, digests: audit.Digests, *rest: Any) -> Ruling:
        if any(list(each.values()).count(audit.FICKLE) > 1 for each in digests.values()):
            return Ruling(sentence=Sentence.SCRIPT)
        return plain(self, digests, *rest)

    patch.setattr(Court, "rule", rule)
    return Machines()


@mutation
def two_machines_that_are_steadily_wrong_are_the_scripts_doing(
    patch: pytest.MonkeyPatch,
) -> Machines:
    patch.setattr(rulings, "STEADY_MAX", 1)
    patch.setattr(audit, "SHARE", 0.0)
    return Machines()


@mutation
def a_refused_joiner_is_the_scripts_doing_the_second_time(patch: pytest.MonkeyPatch) -> Machines:
    plain = Newcomers.judge

    def judge(self: Newcomers, *found: Any) -> tuple[tuple[WorkerId, ...], Refusal]:
        refused, refusal = plain(self, *found)
        again = refusal is Refusal.QUARANTINED
        return refused, Refusal.SCRIPT if again else refusal

    patch.setattr(Newcomers, "judge", judge)
    return Machines()


@mutation
def who_was_unproven_is_proved_by_a_new_view(patch: pytest.MonkeyPatch) -> Machines:
    plain = view_making._find_unproven

    def unproven(proposal: Proposal, old: View | None, roster: Roster) -> tuple[WorkerId, ...]:
        return plain(proposal, None, roster)

    patch.setattr(view_making, "_find_unproven", unproven)
    return Machines()
