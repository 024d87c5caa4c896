"""Planted bugs within a step: counting, saving, copying, redoing and asking."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.replica.copies import RoomWait
from holdfast.engine.core.replica.replica import StoreWait
from holdfast.engine.core.replica.saves import Saves
from holdfast.engine.core.step import backup
from holdfast.engine.core.step.activities import Activity
from holdfast.engine.core.step.audit import Audit
from holdfast.engine.core.step.backup import Settlement
from holdfast.engine.core.step.judging import Judged, Judging
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.step.script_tasks import ScriptTasks
from holdfast.engine.core.step.step_machine import StepMachine
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.views import View
from holdfast.engine.core.worker import machine
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation


def machines_with(patch: pytest.MonkeyPatch, step_machine: type[StepMachine]) -> Machines:
    """Return machines whose workers' steps are decided by this machine."""
    patch.setattr(machine, "StepMachine", step_machine)
    return Machines()


# ---------------------------------------------------------------- checkpoints


@mutation
def a_checkpoint_counts_although_a_share_is_lost(patch: pytest.MonkeyPatch) -> Machines:
    plain = Saves.record_end

    def ended(self: Saves, save: ev.SaveEnded, committed: int) -> Any:
        return plain(self, dataclasses.replace(save, durable=True, problem=""), committed)

    patch.setattr(Saves, "record_end", ended)
    return Machines()


@mutation
def a_checkpoint_counts_before_its_state_was_compared(patch: pytest.MonkeyPatch) -> Machines:
    plain = Saves.count_compared

    def compared(self: Saves, committed: int) -> Any:
        return plain(self, 1 << 60)

    patch.setattr(Saves, "count_compared", compared)
    return Machines()


@mutation
def a_checkpoint_counts_although_who_saved_it_left_uncompared(
    patch: pytest.MonkeyPatch,
) -> Machines:
    patch.setattr(Saves, "drop_unconfirmed", lambda self, step: None)
    return Machines()


@mutation
def a_last_checkpoint_is_not_checked(patch: pytest.MonkeyPatch) -> Machines:
    plain = Saves.next_copy

    def at_boundary(self: Saves, step: int) -> list[ef.Outcome]:
        return [
            dataclasses.replace(each, checked=False) if isinstance(each, ef.CopyState) else each
            for each in plain(self, step)
        ]

    patch.setattr(Saves, "next_copy", at_boundary)
    return Machines()


# ---------------------------------------------------------------- who counts


@mutation
def a_step_does_not_wait_for_enough(patch: pytest.MonkeyPatch) -> Machines:
    def hasty(policy: BackupPolicy, members: int, done: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(sorted(done))

    patch.setattr(backup, "find_counted", hasty)
    return Machines()


@mutation
def two_members_read_the_settlement_differently(patch: pytest.MonkeyPatch) -> Machines:
    plain = Settlement.record_settled

    def settled(self: Settlement, step: int, ranks: tuple[int, ...]) -> None:
        plain(self, step, ranks[:-1] if self._rank % 2 else ranks)

    patch.setattr(Settlement, "record_settled", settled)
    return Machines()


@mutation
def who_is_dropped_adds_its_tasks(patch: pytest.MonkeyPatch) -> Machines:
    """The dropped worker should add zeros."""
    plain = Settlement.counted_ranks

    def counted(self: Settlement, step: int) -> tuple[int, ...] | None:
        ranks = plain(self, step)
        return None if ranks is None else tuple(sorted({*ranks, self._rank}))

    patch.setattr(Settlement, "counted_ranks", counted)
    return Machines()


# ---------------------------------------------------------------- sums


@mutation
def a_sum_that_is_not_finite_is_committed(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Judging, "doubt", property(lambda self: ev.Doubt.FINITE))
    return Machines()


@mutation
def a_lone_worker_believes_what_is_not_finite(patch: pytest.MonkeyPatch) -> Machines:
    plain = Rulings.believes_not_finite

    def believes(self: Rulings, step: int, bits: int) -> bool:
        return len(self._view.members) == 1 or plain(self, step, bits)

    patch.setattr(Rulings, "believes_not_finite", believes)
    return Machines()


@mutation
def a_wrong_sum_is_not_put_right(patch: pytest.MonkeyPatch) -> Machines:
    class Seeing(StepMachine):
        def handle_sum_check(self, event: ev.SumChecked) -> None:
            super().handle_sum_check(event)
            effects = self._standing.take_effects()
            self._standing.order(*(e for e in effects if not isinstance(e, ef.UseCorrectSum)))

    return machines_with(patch, Seeing)


@mutation
def members_vote_before_their_sums_were_checked(patch: pytest.MonkeyPatch) -> Machines:
    def check(self: Judging) -> Judged:
        self._course.go_to(Activity.CHECK_SUMS)
        return Judged(is_believed=True)

    patch.setattr(Judging, "_check_sums", check)
    return Machines()


@mutation
def the_redo_is_forgotten_when_a_task_is_under_way(patch: pytest.MonkeyPatch) -> Machines:
    plain = ScriptTasks.repeat

    def repeat(self: ScriptTasks, audits: Sequence[Audit]) -> None:
        plain(self, audits)
        if self._course.activity is Activity.REDO:
            self._course.go_to(Activity.TASKS)

    patch.setattr(ScriptTasks, "repeat", repeat)
    return Machines()


# ---------------------------------------------------------------- speculative tasks


@mutation
def a_contradicted_speculative_task_is_ignored(patch: pytest.MonkeyPatch) -> Machines:
    class Trusting(StepMachine):
        def handle_sums(self, event: ev.Summed) -> None:
            super().handle_sums(dataclasses.replace(event, unlike=()))

    return machines_with(patch, Trusting)


@mutation
def a_speculative_task_is_adopted_twice(patch: pytest.MonkeyPatch) -> Machines:
    def adopt(self: OpenStep, hosted: Iterable[int]) -> list[int]:
        found = [vrank for vrank in hosted if vrank in self.speculative]
        self.samples.update((vrank, self.speculative[vrank]) for vrank in found)
        return found

    patch.setattr(OpenStep, "adopt", adopt)
    return Machines()


@mutation
def a_speculative_task_is_adopted_by_who_does_not_host_it(patch: pytest.MonkeyPatch) -> Machines:
    plain = OpenStep.adopt

    def adopt(self: OpenStep, hosted: Iterable[int]) -> list[int]:
        return plain(self, tuple(self.speculative))

    patch.setattr(OpenStep, "adopt", adopt)
    return Machines()


@mutation
def what_was_looked_for_in_an_old_view_is_copied_in_a_new_one(
    patch: pytest.MonkeyPatch,
) -> Machines:
    class Mindful(StepMachine):
        def enter(self, view: View) -> None:
            late = self.watch.late
            super().enter(view)
            self.watch.late = late

        def close(self) -> Doubted | None:
            late = self.watch.late
            doubted = super().close()
            self.watch.late = late
            return doubted

    return machines_with(patch, Mindful)


# ---------------------------------------------------------------- stores


@mutation
def a_store_that_refuses_for_ever_is_asked_for_ever(patch: pytest.MonkeyPatch) -> Machines:
    plain = StoreWait.record_silence

    def silent(self: StoreWait, reason: str, now: float) -> Sequence[Any]:
        self.record_answer()
        return plain(self, reason, now)

    patch.setattr(StoreWait, "record_silence", silent)
    return Machines()


@mutation
def who_has_room_again_goes_on_in_a_view_that_has_ended(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(RoomWait, "close", lambda self: None)
    return Machines()
