"""How far a job has come, and when it is given up because it comes no further."""

from __future__ import annotations

import pytest

from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import LateWorker
from holdfast.engine.core.worker_status import JobEvent
from roster_kit import invalid, status, view_of

FIRST = WorkerId(0)


def comes_to(progress: Progress, step: int) -> bool:
    """Record a step, and decide; return whether it is the newest."""
    is_new = progress.record_step(step)
    progress.settle()
    return is_new


def test_progress_forgives_losses_and_only_new_steps_forgive_going_back() -> None:
    progress = Progress(5)
    assert progress.losses == 0
    assert [progress.record_step(step) for step in (5, 4, 6, 6)] == [False, False, True, False]
    for _ in range(3):
        progress.count_loss(FIRST, "ended by SIGKILL")
    assert progress.reason_to_give_up(3, 1) == ""
    progress.count_loss(FIRST, "out of memory\nand more")
    assert "4 workers were lost at step 6" in progress.reason_to_give_up(3, 1)
    assert "(the last one: out of memory): see" in progress.reason_to_give_up(3, 1)
    assert comes_to(progress, 7)
    assert progress.reason_to_give_up(3, 1) == ""
    for count in (1, 2):
        assert not progress.has_gone_back((invalid(count, count),))
        progress.go_back((invalid(count, count),))
        assert progress.has_gone_back((invalid(count, count),))
        progress.step = 2
        assert comes_to(progress, 7)  # no further than before
    assert progress.reason_to_give_up(3, 2) == ""
    assert "2 times, not further than step 7" in progress.reason_to_give_up(3, 1)
    assert comes_to(progress, 8)
    assert progress.reason_to_give_up(3, 1) == ""


def test_a_job_that_is_lost_again_and_again_before_a_new_step_is_given_up() -> None:
    progress = Progress(0)
    for _ in range(3):
        progress.begin(5)
        assert comes_to(progress, 7)
        assert progress.reason_to_give_up(2, 1) == ""
        progress.count_loss(FIRST, "ended by SIGKILL")
    progress.begin(5)
    progress.begin(5)  # no loss in between
    assert progress.reason_to_give_up(3, 1) == ""
    assert "began again 3 times and never came further than step 7" in progress.reason_to_give_up(
        2, 1
    )
    assert comes_to(progress, 8)
    assert progress.reason_to_give_up(2, 1) == ""


def test_steps_that_only_the_memory_of_nodes_shows_forgive_losses_as_well() -> None:
    """All workers may be lost before they have reported the steps that they committed."""
    progress = Progress(0)
    assert comes_to(progress, 10)
    for step in (10, 12):
        for _ in range(2):
            progress.count_loss(FIRST, "ended by SIGKILL")
        progress.begin(step)
    assert progress.reason_to_give_up(1, 1) == ""
    progress.count_loss(FIRST, "ended by SIGKILL")
    progress.count_loss(FIRST, "ended by SIGKILL")
    progress.begin(11)  # a piece was lost: no further than before
    assert "2 workers were lost at step 11" in progress.reason_to_give_up(1, 1)


@pytest.mark.parametrize(
    ("why", "text", "ends"),
    [
        ("ended by SIGKILL", "the task of virtual rank 3 was computed wrongly", True),
        ("ended by SIGSEGV", "", True),
        ("ended by SIGKILL", "", False),  # an operator, or a manager that takes nodes away
        ("its node is lost", "", False),
    ],
)
def test_a_job_does_not_begin_again_from_one_step_for_one_reason_for_ever(
    why: str, text: str, ends: bool
) -> None:
    progress = Progress(0)
    for count in range(3):
        assert progress.reason_to_give_up(30, 30) == ""
        progress.begin(5)
        comes_to(progress, 7)
        if text:
            events = (JobEvent(number=count + 1, kind="wrong", text=text),)
            progress.record_words(status(0, events=events))
        progress.count_loss(FIRST, why)
    assert progress.reason_to_give_up(30, 30) == ""
    progress.begin(5)
    told = progress.reason_to_give_up(30, 30)
    assert bool(told) is ends
    assert not ends or f"from step 5 3 times for the same reason: {text or why}" in told
    comes_to(progress, 8)
    assert progress.reason_to_give_up(30, 30) == ""


def test_a_worker_that_is_late_again_and_again_is_taken_back_later_each_time() -> None:
    """It is late in the step after each return, and is then on time for a while."""
    progress, delays = Progress(0), []
    step = 0
    for _ in range(8):
        lag = LateWorker(worker=FIRST, incarnation=Incarnation(1), committed=step)
        view = view_of(1, 2, suspended=(lag,), resume_step=step)
        progress.note_view(view, begins=False)
        progress.record_step(step)
        began = step
        while FIRST in progress.held_back(view):
            step += 1
            progress.record_step(step)
        delays.append(step - began)
        progress.note_view(view_of(0, 1, 2, resume_step=step), begins=False)
        step += 1
    assert delays == [0, 2, 4, 8, 16, 32, 32, 32]
    step += 200
    progress.note_view(view_of(0, 1, resume_step=step), begins=False)
    lag = LateWorker(worker=FIRST, incarnation=Incarnation(1), committed=step)
    view = view_of(1, 2, suspended=(lag,), resume_step=step)
    progress.note_view(view, begins=False)
    progress.record_step(step)
    assert progress.held_back(view) == frozenset()
