"""Workers whose ledgers cannot grow save their state, rest and continue: decisions of the core."""

from __future__ import annotations

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.membership import formation as fo
from holdfast.engine.core.membership.event_log import ROOM, EventLog
from holdfast.engine.core.replica.copies import STEPS_MAX
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.worker_status import JobEvent, Phase
from machine_kit import Company, Walker, a_view
from roster_kit import Cluster, member, view_of

ONE = ViewNumber(1)
FULL, FREE = ev.RoomSeen(has_room=False), ev.RoomSeen(has_room=True)


def training(workers: int = 2, *, saves: bool = True) -> Company:
    """Return workers that have committed a step and rest in their scripts."""
    company = Company(workers, StepPolicy(saves=SavePolicy(enabled=saves, every=1000)))
    company.enter(a_view(1, range(workers), joiners=range(workers)))
    return company


def go_on(company: Company) -> None:
    """Make each script that has committed a step rest at its boundary."""
    for walker in company.members:
        if walker.status.phase is Phase.SCRIPT:
            walker.feed(ev.AtBoundary())
    company.settle()


def begun(walker: Walker) -> int:
    return walker.orders(ef.Begin)[-1].step


def test_workers_without_room_save_the_next_state_and_rest_until_there_is_room() -> None:
    company = training()
    for walker in company.members:
        walker.feed(FULL)
        assert walker.status.no_room
    for _ in range(4):
        go_on(company)
    for walker in company.members:
        (copy,) = walker.orders(ef.CopyState)
        assert (copy.step, walker.status.committed, begun(walker)) == (2, 2, 1)
        assert (walker.status.phase, walker.status.promised) == (Phase.BOUNDARY, 0)
    for walker in company.members:
        effects = walker.feed(FREE)
        assert ef.Begin(2, whole=True) in effects
        assert not walker.status.no_room
    go_on(company)
    assert company.walkers[0].status.committed == 3


def test_a_worker_that_alone_lacks_room_has_all_save() -> None:
    company = training()
    lacking, other = company.walkers
    lacking.feed(FULL)
    for _ in range(3):
        go_on(company)
    assert [len(walker.orders(ef.CopyState)) for walker in company.members] == [1, 1]
    assert (lacking.status.phase, other.status.phase) == (Phase.BOUNDARY, Phase.WAITING)
    lacking.feed(FREE)
    company.settle()
    assert other.status.committed == 3


def test_without_a_store_a_worker_rests_at_once() -> None:
    company = training(1, saves=False)
    (walker,) = company.members
    walker.feed(FULL)
    go_on(company)
    assert (walker.status.phase, walker.status.committed) == (Phase.BOUNDARY, 1)
    walker.feed(FREE)
    assert begun(walker) == 1


def test_a_worker_that_still_saves_rests_until_it_can_save_again() -> None:
    company = training(1)
    (walker,) = company.members
    walker.feed(FULL)
    go_on(company)
    go_on(company)
    assert walker.status.committed == 2
    walker.feed(FREE)
    company.settle()
    walker.feed(FULL)  # while the state after two steps is written
    go_on(company)
    assert (walker.status.phase, walker.status.committed) == (Phase.BOUNDARY, 3)
    walker.feed(ev.SaveEnded(2, ONE, durable=True, first=True))
    company.settle()
    go_on(company)
    assert [copy.step for copy in walker.orders(ef.CopyState)] == [2, 4]
    assert walker.status.phase is Phase.BOUNDARY


def test_a_worker_takes_few_steps_if_others_cannot_save() -> None:
    company = training()
    lacking, other = company.walkers
    other.feed(FULL)
    go_on(company)
    go_on(company)
    other.feed(FREE)
    lacking.feed(ev.SaveEnded(2, ONE, durable=True, first=True))
    company.settle()
    lacking.feed(FULL)
    before = lacking.status.committed
    for _ in range(2 * STEPS_MAX):
        go_on(company)
    assert lacking.status.committed == before + STEPS_MAX
    assert lacking.status.phase is Phase.BOUNDARY


def test_a_worker_without_room_makes_way_for_a_planned_change_and_for_a_new_view() -> None:
    company = training(saves=False)
    lacking, _ = company.walkers
    lacking.feed(FULL)
    go_on(company)
    lacking.feed(ev.Directed(WorkerDirective(view=None, pending_view=ONE)))
    assert lacking.status.at_boundary
    assert "the planned change comes at once" in lacking.status.left_for
    company.walkers[1].feed(ev.GroupBroken(ONE, "gone"))
    company.enter(a_view(2, range(2), 1))
    assert lacking.status.phase is Phase.BOUNDARY
    assert begun(lacking) == 0
    lacking.feed(FREE)
    company.settle()
    assert {walker.status.committed for walker in company.members} == {2}


def test_nobody_is_late_or_hangs_while_a_member_waits_for_room() -> None:
    overdue = member(0, view=ONE, phase=Phase.OVERDUE)
    for no_room in (False, True):
        late = member(1, view=ONE, phase=Phase.BOUNDARY, no_room=no_room)
        facts = Cluster(overdue, late).facts(view_of(0, 1))
        assert facts.has_no_room() is no_room
        why = fo.reason_to_stop(facts, 100.0, 5.0, minds_late=True)
        assert (why is None) is no_room


def test_the_lack_of_room_is_told_once_by_many_workers() -> None:
    log, texts = EventLog(()), []
    for number, text in enumerate(["full", "free", "full"], start=1):
        for worker in range(3):
            status = member(worker, events=(JobEvent(number=number, kind=ROOM, text=text),))
            texts += [(each.text, each.worker) for each in log.news([status])]
            log.mark(status)
    assert texts == [("full", None), ("free", None), ("full", None)]
