"""The core must decide when a share of the state is saved, and when a checkpoint counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.engine.core.ground.effects import CopyState, Tell
from holdfast.engine.core.ground.events import EventNoted, SaveEnded, SinkKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.ground.vote import Wish
from holdfast.engine.core.policies import PacePolicy, ReplicationPolicy
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.intervals import Exposure
from holdfast.engine.core.replica.saves import SavedUpTo, SavePolicy, Saves
from holdfast.engine.core.types import Incarnation, ViewNumber, WorkerId
from machine_kit import a_view


def saving(every: int = 10, *, compared: bool = False) -> Saves:
    saves = Saves(SavePolicy(enabled=True, every=every, compared=compared), WorkerId(0), Exposure())
    saves.enter(a_view(1, range(2)), 0.0)
    return saves


def saved(saves: Saves, step: int, committed: int) -> list[Any]:
    """Agree on a checkpoint after `committed` steps, copy it, and make it durable."""
    saves.agree(step, a_view(1, range(2)), Wish.SAVE)
    saves.next_copy(step)
    saves.record_copy(step, 0.0, 0.1, "")
    return saves.record_end(answered(step), committed)


def answered(step: int, number: int = 1) -> SaveEnded:
    return SaveEnded(step, ViewNumber(number), durable=True, first=True)


def test_the_leader_wants_a_save_at_intervals_and_once_for_each() -> None:
    saves, wanted = saving(), []
    for step in range(4, 40):
        due, _ = saves.opinion(step, float(step), leads=True)
        if due:
            saves.agree(step + 1, a_view(1, range(2)), due)
            assert saves.next_copy(step + 1) == [
                CopyState(SinkKind.STORE, step + 1, a_view(1, range(2)))
            ]
            saves.record_copy(step + 1, float(step), 0.1, "")
            saves.record_end(answered(step + 1), step + 1)
            wanted.append(step + 1)
    assert wanted == [10, 20, 30, 40]
    assert saving().opinion(9, 0.0, leads=False) == (False, False)
    for no_writer_or_no_view in (SavePolicy(), SavePolicy(enabled=True, every=1)):
        saves = Saves(no_writer_or_no_view, WorkerId(0), Exposure())
        assert saves.opinion(9, 0.0, leads=True) == (False, False)


def test_only_the_agreed_step_is_copied() -> None:
    saves = saving()
    assert saves.next_copy(10) == []
    saves.agree(10, a_view(3, range(2)), Wish.SAVE)
    assert saves.next_copy(9) == saves.next_copy(11) == []
    assert saves.next_copy(10) == [CopyState(SinkKind.STORE, 10, a_view(3, range(2)))]


@pytest.mark.parametrize("early", [False, True])
def test_a_worker_is_busy_from_the_order_to_the_answer(early: bool) -> None:
    """The worker is busy even if the answer arrives before the script has reported its copy."""
    saves = saving()
    saves.agree(10, a_view(1, range(2)), Wish.SAVE)
    saves.next_copy(10)
    assert saves.opinion(10, 1.0, leads=True) == (False, True)
    failed = SaveEnded(10, ViewNumber(1), problem="the writer died")
    if early:
        saves.record_end(failed, 10)
    saves.record_copy(10, 1.0, 0.1, "")
    if not early:
        assert saves.opinion(11, 2.0, leads=True) == (False, True)
        saves.record_end(failed, 10)
    assert saves.opinion(12, 3.0, leads=True) == (False, False)


def test_a_checkpoint_counts_once_its_state_was_compared() -> None:
    saves = saving(compared=True)
    saves.enter_loop()
    assert counting(saved(saves, 10, 10)) == []
    assert counting(saves.count_compared(10)) == []
    assert counting(saves.count_compared(11)) == [10]
    assert counting(saves.count_compared(12)) == []
    assert counting(saved(saves, 20, 25)) == [20]  # it took long
    assert counting(saved(saves, 30, 30)) == []
    assert counting(saves.finish_loop(30)) == [30]  # no step follows in which it could be compared
    saves.enter_loop()
    assert counting(saved(saves, 40, 40)) == []
    saves.want(1)  # the job ends
    assert counting(saves.count_compared(40)) == []
    assert counting(saved(saving(), 10, 10)) == [10]  # no states are ever compared


def test_only_the_whole_checkpoint_counts_and_one_worker_tells_why_it_does_not() -> None:
    saves = saving()
    share = SaveEnded(10, ViewNumber(1))  # it is written, and other shares may not be
    assert saves.record_end(share, 20) == saves.count_compared(20) == []
    failed = SaveEnded(10, ViewNumber(1), problem="no space left")
    assert saves.record_end(failed, 20) == []
    assert saves.record_end(replace(failed, first=True), 20) == [
        EventNoted("unsaved", "step 10 is not saved: no space left")
    ]
    assert saves.count_compared(20) == []


def counting(outcomes: list[Any]) -> list[int]:
    return [each.step for each in outcomes if isinstance(each, SavedUpTo)]


def test_a_copy_that_nobody_took_is_not_made_again_after_every_step() -> None:
    """Such a copy costs as much time as a copy that is saved."""
    pace = PacePolicy(least_s=3600.0, most_s=3600.0)
    saves = Saves(SavePolicy(enabled=True, pace=pace), WorkerId(0), Exposure())
    saves.enter(a_view(1, [0]), 0.0)
    assert saves.opinion(9, 7200.0, leads=True) == (Wish.SAVE, False)
    saves.agree(10, a_view(1, [0]), Wish.SAVE)
    assert saves.next_copy(10) == [CopyState(SinkKind.STORE, 10, a_view(1, [0]))]
    saves.record_copy(10, 7200.0, 0.5, "the writer takes no orders")
    assert saves.opinion(10, 7201.0, leads=True) == (False, False)


def test_an_operator_who_ends_the_job_has_one_checkpoint_made() -> None:
    saves = saving(compared=True)
    saves.want(1)
    assert saves.opinion(12, 0.0, leads=False) == (Wish.LAST_SAVE, False)
    saves.agree(13, a_view(1, range(2)), Wish.LAST_SAVE)
    assert saves.next_copy(13) == [CopyState(SinkKind.STORE, 13, a_view(1, range(2)), checked=True)]
    assert counting(saves.record_end(answered(13), 13)) == [13]  # no member may compare it
    saves.want(1)  # asked for again and again until the job has ended
    assert saves.opinion(13, 0.0, leads=False) == (False, False)


@pytest.mark.parametrize("durable_first", [False, True])
def test_a_checkpoint_of_a_worker_that_left_uncompared_does_not_count(durable_first: bool) -> None:
    """It does not matter whether it is durable by then, or whether workers have joined."""
    for others, counts in ((range(3), True), ([0], False)):
        saves = saving(compared=True)
        saves.enter_loop()
        saves.agree(10, a_view(1, range(2)), Wish.SAVE)
        saves.next_copy(10)
        if durable_first:
            assert counting(saves.record_end(answered(10), 10)) == []
        saves.enter(a_view(2, others), 0.0)
        saves.drop_unconfirmed(10)
        if not durable_first:
            assert counting(saves.record_end(answered(10), 10)) == []
        assert counting(saves.count_compared(11)) == ([10] if counts else [])
    late = saving(compared=True)
    assert counting(saved(late, 10, 10)) == []
    late.enter(a_view(2, [0]), 0.0)
    late.drop_unconfirmed(11)  # a worker that was compared in the step before left
    assert counting(late.count_compared(11)) == [10]


def test_a_checkpoint_counts_in_the_view_by_which_its_next_step_is_committed() -> None:
    """This member did not get the votes of that step; the other members have compared states."""
    standing = Standing(WorkerId(0), Incarnation(1))
    saves = SavePolicy(enabled=True, every=10, compared=True)
    copies = Copies(standing, saves, ReplicationPolicy())
    standing.change(committed=10)
    copies.enter(a_view(1, range(2)))
    copies.saves.agree(10, a_view(1, range(2)), Wish.SAVE)
    assert copies.copy_next(None, within=True)
    copies.record_save_end(answered(10))
    assert standing.status.saved < 10, "nobody has compared it"
    standing.change(committed=11)
    copies.enter(a_view(2, range(2)))
    assert standing.status.saved == 10
    assert Tell(standing.status) in standing.take_effects()
