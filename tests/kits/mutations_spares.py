"""Planted bugs of holding workers back as spares."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import pytest

from holdfast.engine.core.membership import formation
from holdfast.engine.core.membership.reserve import Reserve
from holdfast.engine.core.membership.view_making import Room
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speeds import Speeds
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation


@mutation
def spares_are_given_tasks_to_balance(patch: pytest.MonkeyPatch) -> Machines:
    plain = Speeds.__init__

    def init(self: Speeds, view: View, policy: BalancePolicy | None) -> None:
        plain(self, dataclasses.replace(view, spares=()), policy)
        self._newly_fed = bool(view.spares)

    patch.setattr(Speeds, "__init__", init)
    return Machines()


@mutation
def who_is_lost_gives_its_place_up(patch: pytest.MonkeyPatch) -> Machines:
    """All spares are kept, even if a worker is lost."""

    def choose(
        workers: Collection[WorkerId],
        owners_now: Sequence[WorkerId],
        room: Room,
        late: Collection[WorkerId] = (),
    ) -> list[WorkerId]:
        hosting = sorted(frozenset(owners_now) & frozenset(workers))
        return hosting or sorted(workers)[: room.hosts]

    patch.setattr(formation, "choose_hosts", choose)
    return Machines()


@mutation
def who_is_last_hosts_tasks_in_mid_step(patch: pytest.MonkeyPatch) -> Machines:
    """A spare with a high number takes over from one that has computed already."""

    def choose(
        workers: Collection[WorkerId],
        owners_now: Sequence[WorkerId],
        room: Room,
        late: Collection[WorkerId] = (),
    ) -> list[WorkerId]:
        return sorted(workers)[-room.hosts :]

    patch.setattr(formation, "choose_hosts", choose)
    return Machines()


@mutation
def everyone_may_be_a_member(patch: pytest.MonkeyPatch) -> Machines:
    def room(self: Reserve) -> Room:
        return Room(hosts=self.policy.virtual_ranks)

    patch.setattr(Reserve, "room", room)
    return Machines()


@mutation
def hot_spares_are_not_brought_up_to_date(patch: pytest.MonkeyPatch) -> Machines:
    """They wait like warm ones until a member is lost."""

    def room(self: Reserve) -> Room:
        return Room(hosts=min(max(self.places, 1), self.policy.virtual_ranks))

    patch.setattr(Reserve, "room", room)
    return Machines()
