"""When a job ends because its workers cannot continue together."""

from __future__ import annotations

import pytest

from holdfast.core.types import Phase, Stage
from test_coordinator_machine import POLICY, begun


def test_members_that_all_wait_for_each_other_are_named_and_get_new_groups() -> None:
    job = begun("a", "b")
    waits = "worker 0 in step 0 (train.py, line 0), worker 1 in step 0 (train.py, line 1)"
    why = f"all workers wait for each other: {waits}"
    for n, name in enumerate("ab"):
        job.say(name, n, phase=Phase.WAITING, hosted=(n,), line=f"train.py, line {n}")
    for count in range(3):
        assert job.view is not None
        assert job.view.number == count + 1
        long_s = POLICY.hang_s * 2**count
        job.pass_time(job.now + long_s - 2.0)
        assert len(job.announced("stop_view")) == count
        job.pass_time(job.now + 4.0)
        if count == 2:
            break
        assert job.announced("stop_view")[-1] == f"view {count + 1} is stopped: {why}"
        for fields in ({}, {"view": count + 2}):
            for n, name in enumerate("ab"):
                job.say(name, n, promised=count + 1, **fields)
    assert job.machine.outcome is not None
    assert job.machine.outcome.startswith(f"{why}, again after new groups were formed")


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
