"""Planted bugs of who computes what: the assignment, and workers that are late."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.engine.core.assignment import assign_at_boundary
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import Wait
from holdfast.engine.core.membership import formation, view_end, view_making
from holdfast.engine.core.step.speeds import Speeds
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.views import LateWorker, View
from holdfast.engine.core.worker.membership import Membership
from holdfast.engine.core.worker_status import ReplicaStage, WorkerStatus
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation

# ---------------------------------------------------------------- assignment


@mutation
def lost_vranks_go_to_nobody(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(formation, "assign_mid_step", lambda survivors, previous, paths: tuple(previous))
    return Machines()


@mutation
def blocks_are_cut_without_regard_to_racks(patch: pytest.MonkeyPatch) -> Machines:
    def assign(vranks: int, workers: Any, previous: Any, paths: Any) -> tuple[Any, ...]:
        return assign_at_boundary(vranks, workers, previous)

    patch.setattr(view_making, "assign_at_boundary", assign)
    return Machines()


@mutation
def a_vrank_goes_to_two(patch: pytest.MonkeyPatch) -> Machines:
    def hosted_by(self: View, worker: Any) -> tuple[int, ...]:
        return tuple(v for v, owner in enumerate(self.owners) if worker in (owner, self.owners[0]))

    def hosted(self: View) -> dict[Any, tuple[int, ...]]:
        return {worker: self.hosted_by(worker) for worker in self.workers}

    patch.setattr(View, "hosted_by", hosted_by)
    patch.setattr(View, "list_hosted", hosted)
    return Machines()


@mutation
def what_the_members_agreed_on_since_is_forgotten(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(formation, "present_owners", lambda view, survivors: view.owners)
    return Machines()


@mutation
def who_is_behind_is_believed_about_assignments(patch: pytest.MonkeyPatch) -> Machines:
    plain = formation.present_owners

    def owners(view: View, survivors: list[WorkerStatus]) -> tuple[Any, ...]:
        turned = [dataclasses.replace(s, committed=-s.committed) for s in survivors]
        return plain(view, turned)

    patch.setattr(formation, "present_owners", owners)
    return Machines()


@mutation
def members_hear_different_times(patch: pytest.MonkeyPatch) -> Machines:
    plain, calls = Speeds.observe, itertools.count()

    def observe(
        self: Speeds, compute_us: Sequence[int], leads: bool, waits: Sequence[Wait] = ()
    ) -> list[tuple[str, str]]:
        heard = compute_us if next(calls) % 2 else [*compute_us[:-1], 9 * compute_us[-1]]
        return plain(self, heard, leads, waits)

    patch.setattr(Speeds, "observe", observe)
    return Machines()


# ---------------------------------------------------------------- late workers


@mutation
def what_is_missed_is_counted_from_the_next_step(patch: pytest.MonkeyPatch) -> Machines:
    plain = formation._late_worker

    def late_worker(status: WorkerStatus) -> LateWorker:
        found = plain(status)
        return dataclasses.replace(found, committed=found.committed + 1)

    patch.setattr(formation, "_late_worker", late_worker)
    return Machines()


@mutation
def what_died_with_a_member_is_taken_for_kept(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(formation, "_have_all_kept", lambda view, kept: True)
    return Machines()


@mutation
def nobody_knows_who_is_behind(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(View, "late_worker", lambda self, worker: None)
    return Machines()


@mutation
def who_catches_up_holds_the_state_already(patch: pytest.MonkeyPatch) -> Machines:
    plain = Membership._install

    def install(self: Membership, view: View) -> None:
        plain(self, view)
        if view.late_worker(self._standing.me) is not None:
            self._standing.change(state=ReplicaStage.CURRENT)

    patch.setattr(Membership, "_install", install)
    return Machines()


@mutation
def the_late_one_goes_on_in_the_old_view(patch: pytest.MonkeyPatch) -> Machines:
    plain = Membership.promise

    def promise(self: Membership, number: ViewNumber, why: str = "") -> bool:
        standing = self._standing
        status = standing.status
        if status.in_step and not status.waiting and self._step.watch.lateness.began_at:
            standing.change(promised=number)
            standing.change(promised=ViewNumber(number - 1))
            standing.order(ef.Tell(dataclasses.replace(standing.status, promised=number)))
            return True
        return plain(self, number, why)

    patch.setattr(Membership, "promise", promise)
    return Machines()


@mutation
def who_stays_away_is_forgotten(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(view_end, "find_too_far_behind", lambda facts, step: [])
    return Machines()
