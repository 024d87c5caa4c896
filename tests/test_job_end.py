"""When a job ends because its workers cannot continue together."""

from __future__ import annotations

import pytest

from holdfast.core.types import Phase, Stage
from test_coordinator_machine import POLICY, begun


def test_members_that_all_wait_for_each_other_are_named_and_get_one_more_group() -> None:
    job = begun("a", "b")
    for n, name in enumerate("ab"):
        job.say(name, n, phase=Phase.WAITING, hosted=(n,), line=f"train.py, line {n}")
    job.pass_time(100.0 + POLICY.hang_s - 1.0)
    assert job.announced("stop_view") == []
    job.pass_time(100.0 + POLICY.hang_s + 1.0)
    waits = "worker 0 in step 0 (train.py, line 0), worker 1 in step 0 (train.py, line 1)"
    why = f"all workers wait for each other: {waits}"
    assert job.announced("stop_view") == [f"view 1 is stopped: {why}"]
    for n, name in enumerate("ab"):
        job.say(name, n, promised=1)
    assert job.view.number == 2
    for n, name in enumerate("ab"):
        job.say(name, n, view=2, promised=1)
    job.pass_time(job.now + POLICY.hang_s + 1.0)
    assert job.machine.outcome is not None
    assert job.machine.outcome.startswith(f"{why}, again after a new group was formed")


@pytest.mark.parametrize("stage", [Stage.READY, Stage.EXITED])
def test_a_member_that_waits_in_a_loop_that_another_one_has_left_ends_the_job(stage: Stage) -> None:
    job = begun("a", "b")
    job.say(
        "a", 0, phase=Phase.ENDED, view=1, committed=7, loop=1, line="train.py, line 9", stage=stage
    )
    job.say(
        "b", 1, phase=Phase.COMPUTING, view=1, committed=7, loop=1
    )  # it may still learn of the end
    assert job.machine.outcome is None
    job.say("b", 1, phase=Phase.OVERDUE, opened=8, line="train.py, line 4")
    told = job.machine.outcome
    assert told is not None
    assert "worker 0 has left its loop after step 7 (train.py, line 9)" in told
    assert "worker 1 begins another step (train.py, line 4)" in told
