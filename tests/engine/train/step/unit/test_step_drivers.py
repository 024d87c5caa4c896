"""The meeting places of a worker's threads: which gets an order, which is woken, which is freed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdfast.engine.core.errors import Aborted, UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import NO_MEMBER, Purpose, SinkKind, Wait
from holdfast.engine.core.types import Incarnation, Peer, Tick, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.train.exchange.seam import SHORT_S, Waits
from holdfast.engine.train.step.buckets import FilledBuckets
from holdfast.engine.train.step.driver import Driver, Monitor, ViewRendezvous
from holdfast.engine.train.step.step_data import FinishedTask, SpeculativeTasks
from holdfast.engine.train.step.step_table import UNWEIGHTED
from holdfast.engine.train.step.values import TaskReport
from machine_kit import a_view

ONE, TWO = ViewNumber(1), ViewNumber(2)
WAIT_S = 20.0  # bounds a hang


class Scripted(WorkerMachine):
    """Answers each event with the effects that a test gives, and remembers the events."""

    def __init__(self, *answers: Sequence[ef.WorkerEffect]) -> None:
        super().__init__(WorkerId(0), Incarnation(1))
        self.answers = list(answers)
        self.heard: list[ev.WorkerEvent] = []
        self.due: float | None = None
        self.shown: View | None = None

    def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
        self.heard.append(event)
        return list(self.answers.pop(0)) if self.answers else []

    def deadline(self) -> float | None:
        return self.due

    @property
    def view(self) -> View | None:
        return self.shown


class Link:
    """Keeps the statuses and addresses sent to the agent."""

    def __init__(self) -> None:
        self.told: list[WorkerStatus] = []
        self.unread = False
        self.published: list[tuple[int, bytes]] = []

    def tell(self, status: WorkerStatus) -> None:
        self.told.append(status)

    def has_unread(self) -> bool:
        return self.unread

    def publish(self, view: int, address: bytes) -> None:
        self.published.append((view, address))


class Group:
    """Is a view's group, with some ranks out of reach."""

    def __init__(self, *lost: int) -> None:
        self.aborted = 0
        self._lost = lost

    def abort(self) -> None:
        self.aborted += 1

    def lost_ranks(self) -> Sequence[int]:
        return self._lost


def driving(*answers: Sequence[ef.WorkerEffect]) -> tuple[Driver, Scripted, Link]:
    machine, link = Scripted(*answers), Link()
    return Driver(machine, link, Monitor()), machine, link


def compute(vrank: int) -> ef.Compute:
    return ef.Compute(0, vrank, Purpose.HOSTED, digest=False, near=False)


def meanwhile(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work` in another thread; return a function that waits for its result or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT_S)
        assert found, "it waits for ever"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return result


# ---------------------------------------------------------------- orders


def test_each_thread_takes_its_own_orders_in_their_order() -> None:
    orders = [ef.Begin(0, whole=False), ef.Install(a_view(1, [0])), compute(0)]
    orders += [ef.Gather(ONE, ev.Topic.AGREE, (0, 0)), ef.SendDone(ONE, 0, 3), ef.Release(1)]
    driver, _, _ = driving(orders)
    driver.post(Tick())
    assert [driver.next_for_script() for _ in range(3)] == [orders[0], orders[2], orders[5]]
    assert [driver.next_for_engine() for _ in range(3)] == [orders[1], orders[3], orders[4]]


def test_a_commit_takes_back_tasks_that_have_not_begun() -> None:
    driver, _, _ = driving([compute(0), ef.Adopt(1), compute(2), ef.Commit(0), compute(3)])
    driver.post(Tick())
    found = [driver.next_for_script() for _ in range(3)]
    assert found == [ef.Adopt(1), ef.Commit(0), compute(3)]


def test_an_event_posted_while_effects_are_carried_out_is_handled_after_them() -> None:
    class Hands:
        def carry_out_now(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
            return [ev.AtBoundary()]

    driver, machine, link = driving([ef.Redo(0), ef.Tell(WorkerStatus(worker=1, incarnation=1))])
    driver.serve(Hands())
    driver.post(ev.LoopFinishing())
    assert machine.heard == [ev.LoopFinishing(), ev.AtBoundary()]
    assert len(link.told) == 1
    driver.post(Tick())
    assert machine.heard[2:] == [Tick()]


def test_a_thread_that_waits_for_an_order_is_woken() -> None:
    driver, _, _ = driving([compute(7)], [ef.Forget(SinkKind.LATE, ONE)])
    script, engine = meanwhile(driver.next_for_script), meanwhile(driver.next_for_engine)
    driver.post(Tick())
    assert script() == compute(7)
    driver.post(Tick())
    assert engine() == ef.Forget(SinkKind.LATE, ONE)


def test_while_the_script_waits_the_machine_is_told_when_its_time_has_come() -> None:
    driver, machine, _ = driving([compute(1)])
    machine.due = 0.0  # long past
    assert driver.next_for_script() == compute(1)
    assert machine.heard == [Tick()]


def test_a_failure_is_raised_where_the_script_waits_and_the_first_one_counts() -> None:
    driver, _, _ = driving([ef.GiveUp("the store is silent")])
    waiting = meanwhile(driver.next_for_script)
    driver.fail(UserError("first"))
    with pytest.raises(UserError, match="first"):
        waiting()
    driver.fail(UserError("second"))
    driver.post(Tick())
    assert str(driver.failure) == "first"
    with pytest.raises(Aborted):
        driver.groups.check_alive(9)
    other, _, _ = driving([ef.GiveUp("the store is silent")])
    other.post(Tick())
    with pytest.raises(UserError, match="the store is silent"):
        other.next_for_script()


# ---------------------------------------------------------------- groups


def test_an_abort_cuts_the_group_of_its_view_and_of_older_ones_only() -> None:
    driver, _, _ = driving([ef.Abort(ONE)], [ef.Abort(TWO)], [ef.Abort(ONE)])
    group = Group()
    driver.groups.adopt(TWO, group)
    driver.post(Tick())
    assert (group.aborted, driver.groups.aborted) == (0, 1)
    driver.groups.check_alive(2)
    driver.post(Tick())
    assert (group.aborted, driver.groups.aborted) == (1, 2)
    driver.post(Tick())
    assert (group.aborted, driver.groups.aborted) == (1, 2)
    for view in (1, 2):
        with pytest.raises(Aborted, match=f"view {view} was given up"):
            driver.groups.check_alive(view)
    with pytest.raises(Aborted):
        driver.groups.adopt(TWO, group)


def test_rows_are_exchanged_once_they_are_shared_and_never_of_a_view_given_up() -> None:
    driver, _, _ = driving([ef.ShareRows(ONE, 4)], [ef.ShareRows(ONE, 5)], [ef.Abort(ONE)])
    waiting = meanwhile(lambda: driver.await_rows(1, 5))
    driver.post(Tick())
    driver.post(Tick())
    waiting()
    again = meanwhile(lambda: driver.await_rows(1, 5))  # each row is shared once
    driver.post(Tick())
    with pytest.raises(Aborted):
        again()


def test_links_are_looked_at_now_and_then_and_lost_ones_are_told_by_worker() -> None:
    driver, machine, _ = driving()
    machine.shown = a_view(1, [3, 5, 7])
    driver.tick()
    assert machine.heard == []
    driver.groups.adopt(ONE, Group(2, 0))
    driver.tick()
    assert machine.heard == [ev.LinkLost(ONE, (7, 3))]
    driver.tick()
    assert len(machine.heard) == 1  # not again that soon
    other, still, _ = driving()
    still.shown = a_view(2, [3, 5])
    other.groups.adopt(ONE, Group(1))
    other.tick()
    assert still.heard == []  # a message about another view
    whole, fine, _ = driving()
    fine.shown = a_view(1, [3, 5])
    whole.groups.adopt(ONE, Group())
    whole.tick()
    assert fine.heard == []


def test_a_tick_is_passed_on_only_when_its_time_has_come() -> None:
    driver, machine, _ = driving()
    for due, heard in ((None, []), (float("inf"), []), (0.0, [Tick()])):
        machine.due = due
        driver.tick()
        assert machine.heard == heard


def test_messages_of_the_agent_are_read_before_the_clock_ends_the_right_to_act() -> None:
    """A process that was paused wakes late; the agent has renewed its right before that."""
    driver, machine, link = driving()
    machine.due, link.unread = time.monotonic() - 1.0, True
    driver.tick()
    assert machine.heard == []
    machine.due, link.unread = time.monotonic() + 1000.0, False
    driver.tick()
    assert machine.heard == []
    machine.due = time.monotonic() - 1.0
    driver.tick()
    assert machine.heard == [Tick()]


def test_addresses_are_those_of_the_view_and_of_no_older_one() -> None:
    driver, _, link = driving([ef.Abort(TWO)])
    view = a_view(2, [3, 5])
    peers = [Peer(WorkerId(3)), Peer(WorkerId(5))]
    meeting = ViewRendezvous(driver, link, view, peers)
    meeting.publish(b"here")
    assert link.published == [(2, b"here")]
    driver.learn_addresses(1, {peers[1]: b"old"})
    waiting = meanwhile(lambda: meeting.lookup(1))
    driver.learn_addresses(2, {peers[0]: b"a", peers[1]: b"b"})
    assert waiting() == b"b"
    assert meeting.lookup(0) == b"a"
    driver.learn_addresses(3, {})
    late = meanwhile(lambda: meeting.lookup(1))
    driver.post(Tick())
    with pytest.raises(Aborted):
        late()
    with pytest.raises(Aborted):
        meeting.publish(b"again")
    assert len(link.published) == 1


# ---------------------------------------------------------------- buckets that are filled


class Filled:
    """Stands for a bucket: its number, and the owners of the tasks in it."""

    def __init__(self, index: int, *contributed: int) -> None:
        self.index = index
        self.contributed = set(contributed)


def nothing() -> None:
    return


def test_a_bucket_is_handed_out_once_all_of_its_tasks_are_in_it() -> None:
    monitor = Monitor()
    filled: Any = FilledBuckets(monitor)
    first, second = Filled(0, 1, 2), Filled(1, 1)
    filled.begin([1, 2], [first, second])
    assert filled.take(False, nothing) is first
    assert filled.take(False, nothing) is None
    with monitor:
        filled.note(second)
    assert filled.take(False, nothing) is None
    waiting = meanwhile(lambda: filled.take(True, nothing))
    second.contributed.add(2)
    with monitor:
        filled.note(second)
    assert waiting() is second
    assert filled.take(True, nothing) is None


def test_buckets_are_handed_out_in_one_order_however_they_fill() -> None:
    filled: Any = FilledBuckets(Monitor())
    first, second = Filled(0), Filled(1, 1)
    filled.begin([1], [first, second])
    assert filled.take(False, nothing) is None
    first.contributed.add(1)
    assert [filled.take(True, nothing) for _ in range(2)] == [first, second]


def test_without_a_share_all_buckets_are_ready_and_after_the_end_none_is_awaited() -> None:
    monitor = Monitor()
    filled: Any = FilledBuckets(monitor)
    buckets = [Filled(i) for i in range(2)]
    filled.begin([], buckets)
    assert [filled.take(True, nothing) for _ in range(2)] == buckets
    filled.begin([1], buckets)

    def given_up() -> None:
        raise Aborted("it was given up")

    with pytest.raises(Aborted):
        filled.take(True, given_up)
    filled.end()
    assert filled.take(True, given_up) is None


# ---------------------------------------------------------------- waits


def test_a_vote_names_the_peer_with_which_the_network_took_longest() -> None:
    now = 10.0
    waits = Waits(lambda: now)
    waits.begin()
    assert waits.wait_of_step() == Wait()
    now = 10.5
    assert waits.now_us() == 500_000
    waits.begin_bucket()
    waits.begin_wait()
    now = 12.0
    waits.record_arrival(3, 750_000)
    assert waits.wait_of_step() == Wait(3, 1_250_000, 1_500_000)
    now = 12.0 + SHORT_S / 2
    waits.record_arrival(2, 0)  # it had arrived by then
    assert waits.wait_of_step().peer == 3
    now = 13.0
    waits.record_arrival(1, 2_900_000)  # it was sent late
    assert waits.wait_of_step().peer == 3
    now = 14.0
    waits.record_arrival(1, 2_000_000)
    assert waits.wait_of_step() == Wait(1, 2_000_000, 3_500_000)
    waits.begin_bucket()
    assert waits.wait_of_step().peer == NO_MEMBER


def test_a_member_that_waits_for_none_names_the_peer_that_sent_last() -> None:
    now = 10.0
    waits = Waits(lambda: now)
    waits.begin()
    waits.begin_bucket()
    now = 11.0
    waits.begin_wait()
    for peer, sent_us in ((1, 300_000), (2, 800_000), (3, 500_000)):
        waits.record_arrival(peer, sent_us)
    assert waits.wait_of_step() == Wait(2, 200_000)


# ---------------------------------------------------------------- speculative tasks


class Recorder:
    """Stands for gradients, table and buffers, and records the calls."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def put(self, *row: object) -> None:
        self.told.append(("put", *row))

    def keep(self, *buffers: object) -> None:
        self.told.append(("keep", *buffers))

    def adopt(self, vrank: int) -> None:
        self.told.append(("adopt", vrank))

    def copy_of(self, vrank: int) -> dict[int, object]:
        return {0: f"copy of {vrank}"}


class Sum:
    """Stands for a bucket's sum, in which these virtual ranks have sent other numbers."""

    def __init__(self, *unlike: int) -> None:
        self.bucket = Filled(0)
        self._unlike = unlike

    def agrees(self, vrank: int, leaf: object) -> bool:
        assert leaf == {0: f"copy of {vrank}"}
        return vrank not in self._unlike


NONE_TAKEN = [0] * 5  # digests of parts of the gradients


def test_a_copy_is_compared_by_a_part_of_its_gradient() -> None:
    noted: Any = Recorder()
    tasks = SpeculativeTasks(noted, noted, noted)
    tasks.keep(1, FinishedTask(loss=0.0, count=1, digest=1, part=6))
    for part, unlike in ((6, ()), (7, (1,)), (0, ())):
        assert tasks.contradicted_vranks([], {}, [0, part, 0]) == unlike


def test_a_copy_is_adopted_with_all_it_has_left_and_is_none_after_that() -> None:
    noted: Any = Recorder()
    tasks = SpeculativeTasks(noted, noted, noted)
    left: Any = object()
    tasks.keep(4, FinishedTask(loss=0.5, count=3, digest=9, weight=1.5, left=left, part=6))
    tasks.keep(2, FinishedTask(loss=0.25, count=2, digest=8))
    sums: Any = [Sum(2), Sum(4)]
    assert tasks.contradicted_vranks(sums, {}, NONE_TAKEN) == (2, 4)
    assert tasks.contradicted_vranks(sums[:1], {}, NONE_TAKEN) == (2,)
    assert tasks.contradicted_vranks([], {}, NONE_TAKEN) == ()
    tasks.adopt(4, (1, 7))
    tasks.adopt(2, (1, 7))
    assert noted.told == [
        ("put", 4, 0.5, 3, 9, (1, 7), 1.5, 6),
        ("keep", 4, left),
        ("adopt", 4),
        ("put", 2, 0.25, 2, 8, (1, 7), UNWEIGHTED, 0),
        ("adopt", 2),
    ]
    assert tasks.contradicted_vranks(sums, {}, NONE_TAKEN) == ()
    tasks.keep(1, FinishedTask(loss=0.0, count=1, digest=1))
    tasks.forget()
    unlike: Any = [Sum(1)]
    assert tasks.contradicted_vranks(unlike, {}, NONE_TAKEN) == ()


def test_a_copy_is_compared_with_what_the_task_has_handed_over() -> None:
    noted: Any = Recorder()
    tasks = SpeculativeTasks(noted, noted, noted)
    report = TaskReport(values={"a": b"1"})
    tasks.keep(1, FinishedTask(loss=0.0, count=1, digest=1, report=report))
    alike: Any = [Sum()]
    assert tasks.contradicted_vranks(alike, {1: report.encode()}, NONE_TAKEN) == ()
    other = TaskReport(values={"a": b"2"}).encode()
    assert tasks.contradicted_vranks(alike, {1: other}, NONE_TAKEN) == (1,)
    assert tasks.contradicted_vranks(alike, {}, NONE_TAKEN) == (1,)
    assert tasks.contradicted_vranks(alike, {1: b"damaged"}, NONE_TAKEN) == (1,)
    substituted = TaskReport(values={"a": b"2"}, bad=b"some record")
    assert tasks.contradicted_vranks(alike, {1: substituted.encode()}, NONE_TAKEN) == ()
