"""The driver of a worker's machine: effects reach whom they are for, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.core.errors import UserError
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.core.step.worker import WorkerMachine
from holdfast.core.types import Incarnation, ViewNumber, WorkerId, WorkerStatus
from holdfast.train.driver import Driver
from holdfast.train.monitor import Monitor

ONE = ViewNumber(1)


class Scripted(WorkerMachine):
    """Answers every event with the same effects."""

    def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
        return [ef.NoteDoubt(3, ONE, again=True), ef.Abort(ONE), ef.Tell(self.snapshot())]


class Link:
    """Keeps what the agent is told."""

    def __init__(self) -> None:
        self.told: list[WorkerStatus] = []

    def tell(self, status: WorkerStatus) -> None:
        self.told.append(status)

    def publish(self, view: int, address: bytes) -> None:
        return


class FullDisk:
    """Cannot write the ledger."""

    def carry_out(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        raise UserError("no space left")


def test_a_full_disk_is_told_to_the_script_and_the_effects_that_follow_are_carried_out() -> None:
    link = Link()
    driver = Driver(Scripted(WorkerId(0), Incarnation(1)), link, Monitor())
    driver.serve(FullDisk())
    driver.post(ev.LinkLost(ONE, ()))  # as the control thread does: it must go on
    assert driver.aborted == 1
    assert len(link.told) == 1
    with pytest.raises(UserError, match="no space left"):
        driver.next_for_script()
