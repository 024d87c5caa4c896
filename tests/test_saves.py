"""When a worker saves its share of the state, and when a checkpoint counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.step.effects import SavedUpTo, SaveShare
from holdfast.core.step.events import EventNoted, SaveEnded
from holdfast.core.step.saves import SavePolicy, Saves
from holdfast.core.types import AgentId, Incarnation, Member, View, ViewNumber, WorkerId


def view(size: int, number: int = 1) -> View:
    workers = [WorkerId(i) for i in range(size)]
    return View(
        number=ViewNumber(number),
        members=tuple(
            Member(worker=w, incarnation=Incarnation(1), agent=AgentId("node0")) for w in workers
        ),
        owners=tuple(workers),
        resume_step=0,
        leader=workers[0],
    )


def saving(every: int = 10, *, compared: bool = False) -> Saves:
    saves = Saves(SavePolicy(enabled=True, every=every, compared=compared))
    saves.enter(view(2), 0.0)
    return saves


def answered(step: int, number: int = 1) -> SaveEnded:
    return SaveEnded(step, ViewNumber(number), durable=True, first=True)


def test_every_so_many_steps_the_leader_wants_one_and_once_for_each() -> None:
    saves, wanted = saving(), []
    for step in range(4, 40):
        due, _ = saves.opinion(step, float(step), leads=True)
        if due:
            saves.agree(step + 1, view(2))
            assert saves.at_boundary(step + 1) == [SaveShare(step + 1, view(2))]
            saves.copied(step + 1, float(step), 0.1, "")
            saves.ended(answered(step + 1), step + 1)
            wanted.append(step + 1)
    assert wanted == [10, 20, 30, 40]
    assert saving().opinion(9, 0.0, leads=False) == (False, False)
    assert Saves(SavePolicy()).opinion(9, 0.0, leads=True) == (False, False)


def test_only_what_was_agreed_on_is_copied() -> None:
    saves = saving()
    assert saves.at_boundary(10) == []
    saves.agree(10, view(2, 3))
    assert saves.at_boundary(9) == saves.at_boundary(11) == []
    assert saves.at_boundary(10) == [SaveShare(10, view(2, 3))]


@pytest.mark.parametrize("early", [False, True])
def test_a_worker_is_busy_from_the_order_to_the_answer(early: bool) -> None:
    """Also if the answer is here before the script says that it has copied."""
    saves = saving()
    saves.agree(10, view(2))
    saves.at_boundary(10)
    assert saves.opinion(10, 1.0, leads=True) == (False, True)
    failed = SaveEnded(10, ViewNumber(1), problem="the writer died")
    if early:
        saves.ended(failed, 10)
    saves.copied(10, 1.0, 0.1, "")
    if not early:
        assert saves.opinion(11, 2.0, leads=True) == (False, True)
        saves.ended(failed, 10)
    assert saves.opinion(12, 3.0, leads=True) == (False, False)


def copied(saves: Saves, step: int) -> SaveEnded:
    """Copy the state after so many steps, as two members agreed; return the writer's answer."""
    saves.agree(step, view(2))
    saves.at_boundary(step)
    saves.copied(step, float(step), 0.1, "")
    return answered(step)


def test_a_checkpoint_counts_once_its_state_was_compared() -> None:
    saves = saving(compared=True)
    saves.loop_entered()
    assert counting(saves.ended(copied(saves, 10), 10)) == []
    assert counting(saves.compared(10)) == []
    assert counting(saves.compared(11)) == [10]
    assert counting(saves.compared(12)) == []
    assert counting(saves.ended(copied(saves, 20), 25)) == [20]  # it took long
    assert counting(saves.ended(copied(saves, 30), 30)) == []
    assert counting(saves.finishing(30)) == [30]  # nothing follows in which it would be compared
    saves.loop_entered()
    assert counting(saves.ended(copied(saves, 40), 40)) == []
    assert counting(saves.want(40)) == [40]  # the job ends
    other = saving()
    assert counting(other.ended(copied(other, 10), 10)) == [10]  # nothing is ever compared


def test_a_checkpoint_does_not_count_if_a_saver_left_before_it_was_compared() -> None:
    saves = saving(compared=True)
    assert counting(saves.ended(copied(saves, 10), 10)) == []
    saves.left(view(1), 10)  # the state of the one that is gone was never compared
    assert counting(saves.compared(11)) == []


def test_only_the_whole_checkpoint_counts_and_one_worker_tells_why_it_does_not() -> None:
    saves = saving()
    share = SaveEnded(10, ViewNumber(1))  # it is written, and others may not be
    assert saves.ended(share, 20) == saves.compared(20) == []
    failed = SaveEnded(10, ViewNumber(1), problem="no space left")
    assert saves.ended(failed, 20) == []
    assert saves.ended(replace(failed, first=True), 20) == [
        EventNoted("save", "step 10 is not saved: no space left")
    ]
    assert saves.compared(20) == []


def counting(outcomes: list[Any]) -> list[int]:
    return [each.step for each in outcomes if isinstance(each, SavedUpTo)]
