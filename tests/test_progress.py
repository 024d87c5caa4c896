"""How far a job has come, and when it is given up because it comes no further."""

from __future__ import annotations

from holdfast.core.membership.progress import Progress
from roster_kit import invalid


def test_progress_forgives_losses_and_only_new_steps_forgive_going_back() -> None:
    progress = Progress(5)
    assert progress.losses == 0
    assert [progress.record_step(step) for step in (5, 4, 6, 6)] == [False, False, True, False]
    for _ in range(3):
        progress.count_loss("ended by SIGKILL")
    assert progress.reason_to_give_up(3, 1) == ""
    progress.count_loss("out of memory\nand more")
    assert "4 workers were lost at step 6" in progress.reason_to_give_up(3, 1)
    assert "(the last one: out of memory): see" in progress.reason_to_give_up(3, 1)
    assert progress.record_step(7)
    assert progress.reason_to_give_up(3, 1) == ""
    for count in (1, 2):
        assert not progress.has_gone_back((invalid(count, count),))
        progress.go_back((invalid(count, count),))
        assert progress.has_gone_back((invalid(count, count),))
        progress.step = 2
        assert progress.record_step(7)  # no further than before
    assert progress.reason_to_give_up(3, 2) == ""
    assert "2 times, not further than step 7" in progress.reason_to_give_up(3, 1)
    assert progress.record_step(8)
    assert progress.reason_to_give_up(3, 1) == ""


def test_a_job_that_is_lost_again_and_again_before_a_new_step_is_given_up() -> None:
    progress = Progress(0)
    for _ in range(3):
        progress.begin(5)
        assert progress.record_step(7)
        assert progress.reason_to_give_up(2, 1) == ""
        progress.count_loss("ended by SIGKILL")
    progress.begin(5)
    progress.begin(5)  # no loss in between
    assert progress.reason_to_give_up(3, 1) == ""
    assert "began again 3 times and never came further than step 7" in progress.reason_to_give_up(
        2, 1
    )
    assert progress.record_step(8)
    assert progress.reason_to_give_up(2, 1) == ""


def test_steps_that_only_the_memory_of_nodes_shows_forgive_losses_as_well() -> None:
    """All workers may be lost before they have reported the steps that they committed."""
    progress = Progress(0)
    assert progress.record_step(10)
    for step in (10, 12):
        for _ in range(2):
            progress.count_loss("ended by SIGKILL")
        progress.begin(step)
    assert progress.reason_to_give_up(1, 1) == ""
    progress.count_loss("ended by SIGKILL")
    progress.count_loss("ended by SIGKILL")
    progress.begin(11)  # a piece was lost: no further than before
    assert "2 workers were lost at step 11" in progress.reason_to_give_up(1, 1)
