"""The driver of a worker's machine: effects reach their targets, even if something goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.types import Incarnation, Tick, ViewNumber, WorkerId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.train.step import driver as driver_module
from holdfast.engine.train.step.buckets import Bucket, FilledBuckets
from holdfast.engine.train.step.driver import Driver, Monitor

ONE = ViewNumber(1)


class Scripted(WorkerMachine):
    """Answers every event with the same effects."""

    def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
        return [ef.NoteDoubt(3, ONE, again=True), ef.Abort(ONE), ef.Tell(self.snapshot())]


class Ordering(WorkerMachine):
    """Answers every event with these effects."""

    def __init__(self, *effects: ef.WorkerEffect) -> None:
        super().__init__(WorkerId(0), Incarnation(1))
        self.effects = list(effects)

    def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
        return self.effects


class Waking(Monitor):
    """Counts how often the waiting threads are woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    def notify_all(self) -> None:
        self.woken += bool(self._waiters)
        super().notify_all()


class Link:
    """Keeps the messages to the agent."""

    def __init__(self) -> None:
        self.told: list[WorkerStatus] = []
        self.unread = False

    def tell(self, status: WorkerStatus) -> None:
        self.told.append(status)

    def has_unread(self) -> bool:
        return self.unread

    def publish(self, view: int, address: bytes) -> None:
        return


class FullDisk:
    """Cannot write the ledger."""

    def carry_out_now(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        raise UserError("no space left")


REDUCE = ef.Reduce(ONE, 3, (WorkerId(0),), (0,))


@pytest.mark.parametrize(
    ("effects", "woken"),
    [
        ((ef.Begin(3),), False),  # for the script, which is not waiting
        ((REDUCE,), False),  # there is no gradient to sum yet
        ((REDUCE, ef.ShareRows(ONE, 3)), True),
        ((ef.CheckSum(ONE, 0, 0),), True),
    ],
)
def test_the_engine_is_woken_only_for_what_it_can_begin_with(
    effects: tuple[ef.WorkerEffect, ...], woken: bool
) -> None:
    monitor = Waking()
    driver = Driver(Ordering(*effects), Link(), monitor)
    threading.Thread(target=driver.next_for_engine, daemon=True).start()
    _until_waiting(monitor)
    driver.post(ev.AtBoundary())
    assert bool(monitor.woken) is woken


def test_a_bucket_that_is_full_wakes_the_engine_which_was_not_woken_to_begin() -> None:
    monitor = Waking()
    driver = Driver(Ordering(REDUCE), Link(), monitor)
    taken: list[ef.WorkerEffect] = []
    engine = threading.Thread(target=lambda: taken.append(driver.next_for_engine()), daemon=True)
    engine.start()
    _until_waiting(monitor)
    driver.post(ev.AtBoundary())
    with monitor:
        FilledBuckets(monitor).note(Bucket(0, [torch.nn.Parameter(torch.zeros(1))], [0]))
    engine.join(30.0)
    assert taken == [REDUCE]


def test_a_script_that_waits_is_woken_when_it_must_look_sooner() -> None:
    monitor, machine = Waking(), Ordering()
    driver = Driver(machine, Link(), monitor)
    script = threading.Thread(target=_wait_for_failure, args=(driver,), daemon=True)
    script.start()
    _until_waiting(monitor)
    driver.post(ev.AtBoundary())
    assert monitor.woken == 0
    sooner = time.monotonic() + 600.0
    machine.deadline = lambda: sooner  # type: ignore[method-assign]
    driver.post(ev.AtBoundary())
    assert monitor.woken == 1
    driver.fail(UserError("the test is over"))  # else it would look without end from then on
    script.join(30.0)
    assert not script.is_alive()


def _wait_for_failure(driver: Driver) -> None:
    with pytest.raises(UserError, match="the test is over"):
        driver.next_for_script()


class Heard(Ordering):
    """Remembers the events as well."""

    def __init__(self, *effects: ef.WorkerEffect) -> None:
        super().__init__(*effects)
        self.heard: list[ev.WorkerEvent] = []

    def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
        self.heard.append(event)
        return super().handle(event, now)

    def deadline(self) -> float | None:
        return 0.0


def test_a_script_that_waits_lets_the_control_thread_read_before_it_looks_at_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "READ_S", 60.0)
    monitor, machine, link = Waking(), Heard(ef.Begin(3)), Link()
    driver = Driver(machine, link, monitor)
    link.unread = True
    script = threading.Thread(target=driver.next_for_script, daemon=True)
    script.start()
    _until_waiting(monitor)
    driver.post(ev.AtBoundary())  # as the control thread does once it has read
    script.join(30.0)
    assert machine.heard == [ev.AtBoundary()]


def test_a_script_looks_at_the_clock_though_nobody_reads_the_messages_of_the_agent() -> None:
    machine, link = Heard(ef.Begin(3)), Link()
    link.unread = True
    assert Driver(machine, link, Monitor()).next_for_script() == ef.Begin(3)
    assert machine.heard == [Tick()]


def _until_waiting(monitor: Waking) -> None:
    while True:
        with monitor:
            if monitor._waiters:
                return


def test_a_full_disk_is_told_to_the_script_and_the_effects_that_follow_are_carried_out() -> None:
    link = Link()
    driver = Driver(Scripted(WorkerId(0), Incarnation(1)), link, Monitor())
    driver.serve(FullDisk())
    driver.post(ev.LinkLost(ONE, ()))  # the control thread does this, and it must continue
    assert driver.groups.aborted == 1
    assert len(link.told) == 1
    with pytest.raises(UserError, match="no space left"):
        driver.next_for_script()
