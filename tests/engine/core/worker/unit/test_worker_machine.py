"""The rights, reports and promises of one worker, in any order of events."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Purpose, SinkKind, SourceKind, StepKind, Topic
from holdfast.engine.core.ground.standing import JOB_EVENTS_MAX
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import Incarnation, Tick, ViewNumber, WorkerId
from holdfast.engine.core.views import LateWorker, Member, View
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage
from machine_kit import Company, Walker, a_view, purposes

ONE, TWO, THREE = ViewNumber(1), ViewNumber(2), ViewNumber(3)
ZERO = WorkerId(0)
STORE, MEMBERS = SourceKind.STORE, SourceKind.MEMBERS


def acting(workers: int = 2, policy: StepPolicy | None = None) -> Company:
    """Return a company that has begun: all wait for each other's votes of step 0."""
    company = Company(workers, policy)
    company.stops_at = Topic.VOTE
    company.enter(a_view(1, range(workers), joiners=range(workers)))
    return company


def alone(policy: StepPolicy | None = None) -> tuple[Company, Walker]:
    """Return one worker between two steps."""
    company = Company(1, policy)
    company.enter(a_view(1, [0], joiners=[0]))
    return company, company.walkers[0]


def direct(walker: Walker, **fields: Any) -> list[ef.WorkerEffect]:
    return walker.feed(ev.Directed(WorkerDirective(**fields)))


# ---------------------------------------------------------------- what it tells


def test_every_status_is_newer_than_the_one_before() -> None:
    company = acting()
    company.stops_at = None
    company.settle()
    company.until(4)
    for walker in company.walkers:
        seqs = [tell.status.seq for tell in walker.orders(ef.Tell)]
        assert seqs == sorted(set(seqs))
        assert walker.status.seq >= seqs[-1]


def test_a_loop_that_is_entered_makes_ready_and_is_counted() -> None:
    walker = Walker(0)
    first = walker.orders(ef.Tell)[0].status
    assert (first.stage, first.loop, first.phase) == (Stage.READY, 1, Phase.SCRIPT)
    walker.feed(ev.LoopEntered())
    assert walker.status.loop == 2


def test_the_newest_events_are_told_and_numbered() -> None:
    walker = Walker(0)
    for i in range(JOB_EVENTS_MAX + 3):
        assert walker.feed(ev.EventNoted("kind", f"text {i}")) == [ef.Tell(walker.status)]
    events = walker.status.events
    assert len(events) == JOB_EVENTS_MAX
    assert [(e.number, e.text) for e in events[-2:]] == [(10, "text 9"), (11, "text 10")]
    assert walker.status.events[0].number == 4


def test_loading_makes_an_initial_state_useless_and_never_the_jobs() -> None:
    walker = Walker(0)
    assert walker.feed(ev.Loading()) == []
    assert walker.status.state is ReplicaStage.OBTAINING
    _, owner = alone()
    owner.feed(ev.Loading())
    assert owner.status.state is ReplicaStage.CURRENT


def test_a_checkpoint_that_cannot_be_read_is_told_with_the_one_that_can() -> None:
    company = Company(1, StepPolicy(keeps=True))
    walker = company.walkers[0]
    walker.install(a_view(1, [0], step=8, joiners=[0]))
    effects = walker.feed(ev.ObtainFailed(STORE, ONE, "its digest differs", 8, 4))
    status = walker.status
    assert (status.unreadable, status.saved, status.state) == (8, 4, ReplicaStage.OBTAINING)
    assert status.promised == 1
    assert [(e.kind, e.text) for e in status.events] == [("rot", "its digest differs")]
    assert isinstance(effects[-1], ef.Tell)
    assert walker.feed(ev.ObtainFailed(STORE, ONE, "", 8, 4)) == [ef.Tell(walker.status)]
    assert len(walker.status.events) == 1


def test_only_the_first_member_tells_that_a_copy_failed() -> None:
    company = Company(2, StepPolicy(saves=SavePolicy(enabled=True, every=1)))
    company.enter(a_view(1, range(2), joiners=range(2)))
    for worker, walker in enumerate(company.walkers):
        walker.feed(ev.StateCopied(SinkKind.STORE, 1, 0.1, "the disk is full"))
        told = [event.text for event in walker.status.events]
        assert told == (["step 1 is not saved: the disk is full"] if worker == 0 else [])


# ---------------------------------------------------------------- promises


def test_a_promise_is_made_once_and_covers_all_older_views() -> None:
    company = acting()
    walker = company.walkers[0]
    effects = direct(walker, stop_view=TWO)
    assert [type(e) for e in effects] == [ef.Abort, ef.Tell]
    assert effects[0] == ef.Abort(TWO)
    assert direct(walker, stop_view=ONE) == direct(walker, stop_view=TWO) == []
    assert walker.status.promised == 2
    assert direct(walker, view=a_view(2, range(2))) == []
    assert walker.status.view == 1


def test_a_lost_link_ends_only_the_present_view() -> None:
    company = acting()
    walker = company.walkers[0]
    assert walker.feed(ev.LinkLost(TWO, (WorkerId(1),))) == []
    effects = walker.feed(ev.LinkLost(ONE, (WorkerId(1),)))
    assert ef.Abort(ONE) in effects
    assert walker.status.unreached == (1,)
    assert walker.feed(ev.LinkLost(ONE, (WorkerId(1),))) == []
    assert [type(e) for e in walker.feed(ev.LinkLost(ONE, (ZERO,)))] == [ef.Tell]
    assert walker.status.unreached == (0, 1)
    company.enter(a_view(2, range(2)))
    assert walker.status.unreached == ()


def test_a_view_of_another_process_or_without_this_worker_is_not_installed() -> None:
    walker = Walker(0)
    other = Member(worker=ZERO, incarnation=Incarnation(2), agent=a_view(1, [0]).members[0].agent)
    later = dataclasses.replace(a_view(1, [0], joiners=[0]), members=(other,))
    assert direct(walker, view=later) == []
    assert direct(walker, view=a_view(1, [1], joiners=[1])) == []
    assert walker.status.view == 0


def test_a_worker_that_is_wrongly_taken_for_a_donor_or_a_joiner_says_so() -> None:
    walker = Walker(0)
    with pytest.raises(InvariantError, match="a donor"):
        walker.install(a_view(1, [0]))
    _, owner = alone()
    with pytest.raises(InvariantError, match="a joiner"):
        owner.install(a_view(2, [0], joiners=[0]))
    with pytest.raises(InvariantError, match="goes back"):
        owner.machine.handle(ev.Directed(WorkerDirective(view=a_view(3, [0], step=0))), 0.0)
    with pytest.raises(InvariantError, match="resumes at 9"):
        owner.machine.handle(ev.Directed(WorkerDirective(view=a_view(4, [0], step=9))), 0.0)


def test_a_worker_that_has_discarded_its_state_enters_no_view() -> None:
    company = Company(2, StepPolicy(audit=1.0, cycle=1, keeps=True))
    company.summed = lambda rank, event: dataclasses.replace(event, parts=(1, 2))
    company.enter(a_view(1, range(2), joiners=range(2)))
    walker = company.walkers[0]
    assert walker.status.state is ReplicaStage.DISTRUSTED
    assert not walker.status.reduced
    (found,) = walker.status.invalidations
    assert (found.after, found.view) == (0, 1)
    effects = walker.install(a_view(2, range(2)))
    assert [type(e) for e in effects] == [ef.Abort, ef.Tell]
    assert (walker.status.view, walker.status.promised) == (1, 2)


# ---------------------------------------------------------------- boundaries and loops


def test_at_a_boundary_the_next_step_begins_unless_a_change_was_announced() -> None:
    _, walker = alone()
    assert walker.status.committed == 1
    assert ef.Begin(1, whole=False) in walker.feed(ev.AtBoundary())
    other = Company(1)
    other.stops_at = Topic.VOTE
    other.enter(a_view(1, [0], joiners=[0]))
    walker = other.walkers[0]
    direct(walker, pending_view=ONE)
    assert walker.machine.pending
    other.stops_at = None
    rows = (walker.take(ef.Gather).row,)  # asked before it was known
    walker.feed(ev.Gathered(ONE, Topic.VOTE, rows))
    assert ef.Begin(1, whole=False) in walker.feed(ev.AtBoundary())
    other.settle()
    effects = walker.feed(ev.AtBoundary())
    assert effects == [ef.Tell(walker.status)]
    assert walker.status.at_boundary
    assert walker.status.promised == ONE


def test_a_worker_that_comes_to_rest_after_a_promise_says_so() -> None:
    company = Company(2)
    company.enter(a_view(1, range(2), joiners=range(2)))
    walker = company.walkers[0]
    walker.feed(ev.GroupBroken(ONE, "gone"))
    assert not walker.status.at_boundary
    assert walker.feed(ev.AtBoundary()) == [ef.Tell(walker.status)]
    assert walker.status.at_boundary


def test_the_step_after_a_save_compares_all_of_the_state() -> None:
    company = Company(1, StepPolicy(saves=SavePolicy(enabled=True, every=3)))
    walker = company.walkers[0]
    company.enter(a_view(1, [0], joiners=[0]))
    for _ in range(5):
        walker.feed(ev.AtBoundary())
        company.settle()
    whole = {begin.step: begin.whole for begin in walker.orders(ef.Begin)}
    assert whole == {0: False, 1: False, 2: False, 3: True, 4: False, 5: False}


# ---------------------------------------------------------------- steps with no boundary before


def open_next(company: Company, kind: StepKind) -> None:
    """Make the scripts begin the next step at once."""
    for walker in company.members:
        assert walker.status.phase is Phase.SCRIPT
        walker.feed(ev.StepOpened(walker.status.committed, kind, rested=False))
    company.settle()


def test_a_checkpoint_due_between_boundaries_is_saved_at_the_next_boundary() -> None:
    company = Company(2, StepPolicy(saves=SavePolicy(enabled=True, every=3)))
    company.enter(a_view(1, range(2), joiners=range(2)))
    company.until(3)  # its votes agree to save
    open_next(company, StepKind.VALUES)
    open_next(company, StepKind.GRADIENTS)
    assert [w.orders(ef.CopyState) for w in company.walkers] == [[], []]
    company.until(6)
    for walker in company.walkers:
        assert [save.step for save in walker.orders(ef.CopyState)] == [5]
        assert [begin.step for begin in walker.orders(ef.Begin) if begin.whole] == [5]


def test_values_are_not_audited_nor_their_time_taken_for_that_of_a_step() -> None:
    for kind in StepKind:
        company = Company(2, StepPolicy(audit=1.0, cycle=1, patience=Patience(steps=1)))
        company.enter(a_view(1, range(2), joiners=range(2)))
        company.until(2)
        open_next(company, kind)
        told = [each.topic for w in company.walkers for each in w.orders(ef.Gather)]
        trains = kind is StepKind.GRADIENTS
        assert told.count(Topic.AUDIT) == 2 * (2 + trains)
        assert company.walkers[0].status.committed == 3


@pytest.mark.parametrize("kind", StepKind)
def test_nobody_is_late_with_values(kind: StepKind) -> None:
    company = Company(2, StepPolicy(patience=Patience(steps=1, copies=1.0)))
    company.enter(a_view(1, range(2), joiners=range(2)))
    company.until(2)
    first, second = company.walkers
    second.holds = lambda task: True
    open_next(company, kind)
    late_at, copy_at = first.machine.deadline(), first.machine.lateness.copy_at
    assert (late_at == copy_at < float("inf")) == (kind is StepKind.GRADIENTS)
    first.now = 1000.0
    first.feed(Tick())
    assert first.status.late == (kind is StepKind.GRADIENTS)
    assert bool(first.orders(ef.LookWhoIsLate)) == (kind is StepKind.GRADIENTS)


def test_an_announced_change_waits_for_the_boundary() -> None:
    company = Company(2)
    company.enter(a_view(1, range(2), joiners=range(2)))
    for walker in company.walkers:
        direct(walker, pending_view=ONE)
    company.until(1)
    open_next(company, StepKind.VALUES)
    for walker in company.walkers:
        assert walker.status.committed == 2
        assert walker.status.promised < ONE
        assert walker.feed(ev.AtBoundary()) == [ef.Tell(walker.status)]
        assert walker.status.promised == ONE


def test_a_suspended_worker_also_receives_steps_that_no_boundary_precedes() -> None:
    lag = LateWorker(worker=WorkerId(1), incarnation=Incarnation(1), committed=0)
    company = Company(2)
    late = company.walkers[1]
    late.holds = lambda task: True
    company.enter(a_view(1, range(2), joiners=range(2)))
    late.feed(ev.GroupBroken(ONE, "suspended"))
    back = dataclasses.replace(
        a_view(3, range(2), 2, joiners=[1]), catching_up=(lag,), leader=WorkerId(0)
    )
    late.feed(ev.TaskDone(0, 1, ev.Purpose.HOSTED, 1))
    late.install(back)
    late.feed(ev.Connected(back.number))
    assert late.take(ef.ObtainStep) == ef.ObtainStep(MEMBERS, back.number, 0)
    assert ef.Commit(0) in late.feed(ev.StepObtained(MEMBERS, back.number, 0))
    late.feed(ev.StepOpened(1, StepKind.VALUES, rested=False))
    assert late.take(ef.ObtainStep) == ef.ObtainStep(MEMBERS, back.number, 1)
    assert ef.Commit(1) in late.feed(ev.StepObtained(MEMBERS, back.number, 1))
    late.feed(ev.AtBoundary())
    assert late.take(ef.SyncState) == ef.SyncState(back.number)


def test_a_loop_is_left_once_when_the_leader_is_past_it_or_by_the_leader_itself() -> None:
    company = acting()
    company.stops_at = None
    company.settle()
    leader, other = company.walkers
    assert ef.Release(1) in leader.feed(ev.LoopEnded())
    assert leader.feed(ev.LoopEnded()) == [ef.Tell(leader.status)]
    assert other.feed(ev.LoopEnded()) == [ef.Tell(other.status)]
    assert other.status.ended
    assert ef.Release(1) in direct(other, release_loop=1)
    assert ef.Release(1) not in direct(other, release_loop=2)
    other.feed(ev.LoopEntered())
    other.feed(ev.LoopEnded())
    assert other.orders(ef.Release) == [ef.Release(1), ef.Release(2)]


# ---------------------------------------------------------------- time


def test_the_right_to_act_ends_at_its_time_and_not_before() -> None:
    company = acting()
    walker = company.walkers[0]
    assert walker.machine.leads(0.0)
    direct(walker, acting_until=5.0)
    assert walker.machine.deadline() == 5.0
    walker.now = 4.9
    assert walker.feed(Tick()) == []
    assert walker.machine.leads(4.9)
    assert not walker.machine.leads(5.0)
    walker.now = 5.0
    assert ef.Abort(ONE) in walker.feed(Tick())
    assert walker.machine.deadline() is None
    assert not walker.machine.leads(0.0)
    assert not company.walkers[1].machine.leads(0.0)


def test_votes_that_come_after_the_right_to_act_ended_commit_nothing() -> None:
    for now, commits in ((4.9, 1), (5.0, 0)):
        company = acting()
        rows = tuple(w.take(ef.Gather).row for w in company.walkers)
        walker = company.walkers[0]
        direct(walker, acting_until=5.0)
        walker.now = now
        walker.feed(ev.Gathered(ONE, Topic.VOTE, rows))
        assert len(walker.orders(ef.Commit)) == commits
        assert walker.status.promised == (0 if commits else 1)


def test_a_vote_proves_that_all_acted_when_the_step_began() -> None:
    company = acting()
    walker = company.walkers[0]
    walker.now = 7.0
    rows = tuple(w.take(ef.Gather).row for w in company.walkers)
    walker.feed(ev.Gathered(ONE, Topic.VOTE, rows))
    assert walker.status.proved_at == 0.0
    walker.now = 9.0
    walker.feed(ev.AtBoundary())
    assert walker.machine.lateness.began_at == 7.0


def test_a_waiting_worker_looks_for_late_ones_once_and_reports_them_once() -> None:
    patience = Patience(steps=1, times=1.0, least_s=10.0, copies=1.0)
    company = Company(2, StepPolicy(patience=patience))
    company.enter(a_view(1, range(2), joiners=range(2)))
    walker, late = company.walkers
    late.holds = lambda task: True
    for each in company.walkers:
        each.now = 1.0
        each.feed(ev.AtBoundary())
    company.settle()
    assert walker.status.phase is Phase.WAITING
    look_at = walker.machine.deadline()
    assert look_at is not None
    walker.now = look_at
    assert walker.feed(Tick()) == [ef.LookWhoIsLate(ONE, 1)]
    say_at = walker.machine.deadline()
    assert say_at is not None
    assert say_at >= look_at + 9.0
    assert walker.feed(Tick()) == []
    walker.now = say_at
    assert walker.feed(Tick()) == [ef.Tell(walker.status)]
    assert walker.status.late
    assert walker.machine.deadline() == float("inf")
    assert walker.feed(Tick()) == []


# ---------------------------------------------------------------- catching up


def behind(step: int, missed: int) -> View:
    lag = LateWorker(worker=WorkerId(1), incarnation=Incarnation(1), committed=step)
    plain = a_view(2, range(2), step=step + missed, joiners=[1])
    return dataclasses.replace(plain, catching_up=(lag,))


def test_a_suspended_worker_applies_its_missed_steps_in_order() -> None:
    company = Company(2)
    late = company.walkers[1]
    company.stops_at = Topic.VOTE
    company.enter(a_view(1, range(2), joiners=range(2)))
    for walker in company.walkers:
        walker.feed(ev.GroupBroken(ONE, "late"))
    company.stops_at = None
    company.walkers[0].install(dataclasses.replace(a_view(2, [0], vranks=2), number=TWO))
    view = dataclasses.replace(behind(0, 2), number=THREE)
    late.install(view)
    assert late.status.state is ReplicaStage.OBTAINING  # useless until it has caught up
    assert late.status.hosted == ()
    effects = late.feed(ev.Connected(THREE))
    assert effects == [ef.ObtainStep(MEMBERS, THREE, 0)]
    assert ef.Commit(0) in late.feed(ev.StepObtained(MEMBERS, THREE, 0))
    assert late.feed(ev.StepObtained(MEMBERS, THREE, 0)) == []
    assert late.status.committed == 1
    effects = late.feed(ev.AtBoundary())
    assert ef.Begin(1, whole=False) in effects
    assert ef.ObtainStep(MEMBERS, THREE, 1) in late.done
    assert purposes(late, Purpose.HOSTED) == [1]  # missed steps are received, not computed
    late.feed(ev.StepObtained(MEMBERS, THREE, 1))
    assert late.status.committed == 2
    assert ef.SyncState(THREE) in late.feed(ev.AtBoundary())
    late.feed(ev.StatesCompared(THREE))
    assert late.status.state is ReplicaStage.OBTAINING
    row = late.take(ef.Gather).row
    late.feed(ev.Gathered(THREE, Topic.AGREE, (row, row)))
    assert (late.status.state, late.status.committed) == (ReplicaStage.CURRENT, 2)
    assert late.status.hosted == (1,)


def test_a_worker_that_rested_when_it_was_suspended_begins_at_once_to_catch_up() -> None:
    company = Company(2)
    late = company.walkers[1]
    company.enter(a_view(1, range(2), joiners=range(2)))
    late.feed(ev.GroupBroken(ONE, "late"))
    late.feed(ev.AtBoundary())
    assert (late.status.at_boundary, late.status.committed) == (True, 1)
    late.install(dataclasses.replace(behind(1, 2), number=THREE))
    assert late.orders(ef.Begin)[-1] == ef.Begin(1, whole=False)
    assert late.feed(ev.Connected(THREE)) == [ef.ObtainStep(MEMBERS, THREE, 1)]


def test_donors_send_missed_steps_and_then_compare() -> None:
    company = Company(2)
    company.stops_at = Topic.VOTE
    company.enter(a_view(1, range(2), joiners=range(2)))
    donor = company.walkers[0]
    donor.feed(ev.GroupBroken(ONE, "late"))
    donor.install(behind(0, 0))
    lag = behind(0, 0).catching_up[0]
    assert donor.feed(ev.Connected(TWO)) == [ef.SendMissed(TWO, lag), ef.SyncState(TWO)]


# ---------------------------------------------------------------- invalidations


def test_an_invalidated_step_does_not_count_as_saved_any_more() -> None:
    policy = StepPolicy(saves=SavePolicy(enabled=True, every=1), keeps=True)
    company, walker = alone(policy)
    walker.feed(ev.AtBoundary())
    company.settle()
    walker.feed(ev.SaveEnded(1, ONE, durable=True, first=True))
    assert walker.status.saved == 1
    for number, after, saved in ((TWO, 1, 1), (THREE, 0, 0)):
        walker.feed(ev.GroupBroken(walker.status.view, "again"))
        step = walker.status.committed + walker.status.reduced
        plain = a_view(number, [0], step=step)
        invalid = Invalidation(after=after, view=number)
        company.enter(dataclasses.replace(plain, invalidations=(invalid,)))
        assert walker.status.saved == saved
        assert ef.Withdraw(walker.status.invalidations) in walker.done
    walker.feed(ev.SaveEnded(1, ONE, durable=True, first=True))
    assert walker.status.saved == 0  # it was made before all was known
