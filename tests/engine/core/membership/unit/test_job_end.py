"""A job must end when its workers cannot continue together."""

from __future__ import annotations

import pytest
from test_coordinator_machine import POLICY, Job, begun

from holdfast.engine.core.job_record import NO_SETBACKS
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage
from roster_kit import status


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


def restarted(job: Job) -> Job:
    """Return the job with a coordinator that has started again, and has the journal."""
    again = Job(record=job.machine.snapshot().record, now=job.now)
    again.known |= job.known
    for name, known in again.known.items():
        again.hear(name, known, view_known=again.number)
    return again


def test_standstills_are_counted_over_restarts_of_the_coordinator() -> None:
    job = begun("a", "b")
    for count in range(3):
        for n, name in enumerate("ab"):
            job.say(name, n, phase=Phase.WAITING, hosted=(n,), line=f"train.py, line {n}")
        job = restarted(job)
        assert job.machine.outcome is None
        job.pass_time(job.now + POLICY.hang_s * 2**count + 4.0)
        for fields in ({}, {"view": count + 2}) if count < 2 else ():
            for n, name in enumerate("ab"):
                job.say(name, n, promised=count + 1, **fields)
    assert job.machine.outcome is not None
    assert "again after new groups were formed" in job.machine.outcome


def test_falls_alike_are_counted_over_restarts_of_the_coordinator() -> None:
    job = begun("a", "b")
    for _ in range(3):
        job = restarted(job)
        assert job.machine.outcome is None
        for n, name in enumerate("ab"):
            job.say(name, n, stage=Stage.LOST, detail="ended by SIGSEGV")
        job.pass_time(job.now + 30.0)
        for n, name in enumerate("ab"):
            wanted = job.told[name].wanted[0] if job.told[name].wanted else None
            if wanted is None:
                break
            job.known[name] = status(n, wanted.incarnation)
            job.say(name, n)
        job.act("a", "b") if job.machine.outcome is None else None
    assert job.machine.outcome is not None
    assert "began again from step 0 3 times for the same reason" in job.machine.outcome


def test_a_new_step_forgives_what_an_earlier_coordinator_has_counted() -> None:
    job = begun("a", "b")
    for n, name in enumerate("ab"):
        job.say(name, n, phase=Phase.WAITING, hosted=(n,))
    job.pass_time(job.now + POLICY.hang_s + 4.0)
    assert job.machine.snapshot().record.setbacks.standstills == 1
    again = restarted(job)
    again.say("a", 0, committed=1, promised=1)
    assert again.machine.snapshot().record.setbacks == NO_SETBACKS


def test_a_leader_that_ended_alone_is_named_by_the_next_coordinator() -> None:
    """The first one has only learnt of the leader when it ends."""
    job = begun("a", "b")
    place = dict(view=1, loop=1, line="train.py, line 9")
    job.say("a", 0, phase=Phase.ENDED, committed=7, stage=Stage.EXITED, **place)
    assert job.machine.outcome is None
    del job.known["a"]  # its node has left
    again = restarted(job)
    again.say("b", 1, committed=7, opened=8, view=1, loop=1, promised=1, phase=Phase.OVERDUE)
    again.say("b", 1, stage=Stage.LOST)
    told = again.machine.outcome
    assert told is not None
    assert "worker 0 has left its loop after step 7 (train.py, line 9)" in told


@pytest.mark.parametrize("shares", [False, True])
def test_a_drain_in_a_standstill_comes_after_it(shares: bool) -> None:
    job = begun("a", "b", keeps=True, replicated=not shares, nodes_max=2)
    job.known["c"] = status(2)
    job.hear("c", status(2))
    for n, name in enumerate("ab"):
        job.say(name, n, phase=Phase.WAITING, hosted=(n,))
    job.node("a", draining="it is needed elsewhere")
    job.pass_time(job.now + POLICY.hang_s + 4.0)
    assert job.told["b"].stop_view == 1
    job.stop("a", "b")
    job.say("c", 2)
    if shares:
        job.say("b", 1, incarnation=2, view=0, state=ReplicaStage.ABSENT, phase=Phase.BOUNDARY)
        job.pass_time(job.now + POLICY.settle_s + 1.0)
        assert job.view is not None
        assert job.view.workers == (1, 2)
    else:
        assert job.number == 2
        job.act("a", "b", promised=1)
        assert job.told["b"].pending_view == 2
