"""Workers that are lost on a node whose end was announced spend no budget of losses."""

from __future__ import annotations

import pytest
from test_coordinator_machine import POLICY, Job, begun

from holdfast.engine.core.worker_status import Phase, Stage
from roster_kit import status

NOTICE = "the spot instance is to terminate"


def lose(job: Job, detail: str) -> None:
    """Lose the worker of node b, and have its node start it again."""
    slot = next(s for s in job.machine.snapshot().record.slots if s.worker == 1)
    job.known["b"] = status(1, slot.incarnation, stage=Stage.LOST, detail=detail)
    job.say("b", 1)
    job.pass_time(job.now + 5.0)


def test_a_planned_leave_is_no_loss() -> None:
    """The worker of a drained node leaves at a boundary, and no loss is counted."""
    job = begun("a", "b", "c")
    job.node("c", draining=NOTICE)
    assert job.told["a"].pending_view == job.number
    job.stop("a", "b", "c", committed=3, phase=Phase.BOUNDARY)
    assert job.view is not None
    assert job.view.workers == (0, 1)
    assert job.announced("lost") == []
    assert job.machine._job.progress.losses == 0


@pytest.mark.parametrize("detail", ["ended by SIGKILL", "the agent of node b ended"])
def test_losses_on_a_node_with_a_notice_do_not_spend_the_budget(detail: str) -> None:
    job = begun("a", "b")
    job.node("b", draining=NOTICE, leaves_in_s=30.0)
    for _ in range(POLICY.restart.losses_max + 1):
        lose(job, detail)
    assert job.machine.outcome is None


def test_losses_without_a_notice_spend_it() -> None:
    job = begun("a", "b")
    for _ in range(POLICY.restart.losses_max + 1):
        lose(job, "ended by SIGKILL")
    assert job.machine.outcome is not None


def test_a_node_that_is_silent_after_its_notice_does_not_spend_the_budget() -> None:
    job = begun("a", "b", "c")
    job.node("b", draining=NOTICE, leaves_in_s=30.0)
    del job.known["b"]  # it never reports again
    job.pass_time(job.now + 60.0)
    assert job.machine._job.progress.losses == 0
