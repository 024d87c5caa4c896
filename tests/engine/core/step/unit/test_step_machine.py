"""The decisions of a worker's machine from one step boundary to the next; the kit walks it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Purpose, SourceKind, Topic
from holdfast.engine.core.membership.view_making import resume_step
from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.core.worker_status import Phase, ReplicaStage
from machine_kit import Company, Walker, a_view, doubts, purposes

STORE = SourceKind.STORE
EAGER = Patience(steps=1, times=0.0, least_s=0.0, copies=1.0)


def walked(workers: int, policy: StepPolicy | None = None, vranks: int = 0) -> Company:
    """Return a company whose members have just begun, as joiners that get no state."""
    company = Company(workers, policy)
    company.stops_at = Topic.VOTE
    everyone = range(workers)
    company.enter(a_view(1, everyone, joiners=everyone, vranks=vranks))
    return company


# ---------------------------------------------------------------- the kit


def test_members_walk_in_lock_step() -> None:
    company = walked(3)
    assert [w.status.committed for w in company.walkers] == [0, 0, 0]
    assert [w.status.phase for w in company.walkers] == [Phase.WAITING] * 3
    company.stops_at = None
    company.settle()
    company.until(5)
    for rank, walker in enumerate(company.walkers):
        assert [commit.step for commit in walker.orders(ef.Commit)] == [0, 1, 2, 3, 4]
        assert purposes(walker, Purpose.HOSTED) == [rank] * 5
        assert walker.status.state is ReplicaStage.CURRENT


def test_the_kit_says_so_when_a_step_is_not_reached() -> None:
    company = walked(2)
    with pytest.raises(AssertionError, match="step 3 is not reached"):
        company.until(3)


# ---------------------------------------------------------------- commits and promises


def test_after_a_promise_nothing_of_the_view_changes_what_is_committed() -> None:
    company = walked(2)
    rows = tuple(w.take(ef.Gather).row for w in company.walkers)
    first, second = company.walkers
    first.feed(ev.Directed(WorkerDirective(stop_view=ViewNumber(1))))
    before = first.status
    assert (before.promised, before.committed, before.reduced) == (1, 0, True)
    assert first.feed(ev.Gathered(ViewNumber(1), Topic.VOTE, rows)) == []
    assert first.status == before
    voted = ef.Commit(0, voted=True)
    assert voted in second.feed(ev.Gathered(ViewNumber(1), Topic.VOTE, rows))
    assert resume_step([first.status, second.status], lost=False)[0] == 1
    company.stops_at = Topic.AGREE
    second.feed(ev.GroupBroken(ViewNumber(1), "a peer died"))
    company.enter(a_view(2, range(2), step=1))
    assert first.orders(ef.Commit) == [ef.Commit(0)]
    assert second.orders(ef.Commit) == [voted]


def test_a_member_lost_before_its_vote_may_have_seen_a_sum_that_is_not_finite() -> None:
    """Two hold the gradient; the third does not believe it, and is lost before it reports that."""
    company = Company(3)
    company.summed, company.stops_at = doubts(2), Topic.VOTE
    company.enter(a_view(1, range(3), joiners=range(3)))
    statuses = [walker.status for walker in company.walkers]
    assert [s.reduced for s in statuses] == [True, True, False]
    assert resume_step(statuses, lost=False)[0] == 0
    assert resume_step(statuses[:2], lost=True)[0] == 0
    for walker in company.walkers[:2]:
        walker.feed(ev.GroupBroken(ViewNumber(1), "a peer died"))
    company.summed, company.stops_at = (lambda rank, event: event), None
    company.enter(a_view(2, range(2), vranks=3))
    assert [w.status.committed for w in company.members] == [1, 1]
    assert purposes(company.walkers[0], Purpose.HOSTED) == [0, 2]  # its own is not computed twice


def test_votes_that_do_not_match_break_the_view() -> None:
    company = walked(2)
    first = company.walkers[0]
    row = first.take(ef.Gather).row
    effects = first.feed(ev.Gathered(ViewNumber(1), Topic.VOTE, (row, (1, 7, *row[2:]))))
    assert ef.Abort(ViewNumber(1)) in effects
    assert first.orders(ef.Commit) == []


def test_a_change_that_one_knows_of_is_announced_to_all() -> None:
    company = walked(2)
    first, second = company.walkers
    assert [w.take(ef.Gather).row[2] for w in company.walkers] == [0, 0]
    company = Company(2)
    company.stops_at = Topic.AGREE
    company.enter(a_view(1, range(2), joiners=range(2)))
    first, second = company.walkers
    first.feed(ev.Directed(WorkerDirective(pending_view=ViewNumber(1))))
    company.stops_at = None
    company.settle()
    assert (first.status.committed, second.status.committed) == (1, 1)
    for walker in company.walkers:
        # The rest of the last votes must still reach the other members.
        assert walker.orders(ef.Abort) == []
        walker.feed(ev.AtBoundary())
        assert walker.orders(ef.Abort) == []
        assert walker.status.at_boundary
        view = a_view(2, range(2), step=1)
        effects = walker.feed(ev.Directed(WorkerDirective(view=view)))
        assert effects[:2] == [ef.Abort(ViewNumber(1)), ef.Install(view)]


@pytest.mark.parametrize(
    "event",
    [ev.GroupBroken(ViewNumber(1), "gone"), ev.LinkLost(ViewNumber(1), (WorkerId(1),))],
    ids=["broken", "link"],
)
def test_a_resting_worker_that_sees_its_group_break_passes_it_on(event: ev.WorkerEvent) -> None:
    company = Company(2)
    company.enter(a_view(1, range(2), joiners=range(2)))
    first, _ = company.walkers
    first.feed(ev.Directed(WorkerDirective(pending_view=ViewNumber(1))))
    for walker in company.walkers:
        walker.feed(ev.AtBoundary())
    company.settle()
    first.feed(ev.AtBoundary())
    assert first.status.promised == 1
    assert ef.Abort(ViewNumber(1)) in first.feed(event)
    assert ef.Abort(ViewNumber(1)) not in first.feed(event)


def test_states_count_as_compared_only_after_joiners_came_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []
    plain = Rulings.record_sync

    def synced(self: Rulings, *, compared: bool) -> None:
        told.append(compared)
        plain(self, compared=compared)

    monkeypatch.setattr(Rulings, "record_sync", synced)
    company = walked(2)
    assert told == [True, True]
    company.stops_at = None
    company.settle()
    company.until(2)
    for walker in company.walkers:
        walker.feed(ev.Directed(WorkerDirective(stop_view=ViewNumber(1))))
        walker.feed(ev.AtBoundary())
    company.enter(a_view(2, range(2), step=2))
    assert told == [True, True, False, False]


def test_a_lost_state_is_given_up_by_all_but_earlier_checkpoints_are_not() -> None:
    company = walked(2)
    company.stops_at = None
    company.settle()
    company.until(3)
    walker = company.walkers[0]
    walker.feed(ev.StateLost())
    (invalidation,) = walker.status.invalidations
    assert (invalidation.after, invalidation.view, invalidation.wrong) == (3, 1, ())
    assert walker.status.promised == 1
    assert walker.status.state is not ReplicaStage.CURRENT


# ---------------------------------------------------------------- again


def test_a_sum_that_somebody_doubts_is_computed_again_with_every_task_twice() -> None:
    company = Company(2, StepPolicy(audit=0.01, cycle=1))
    company.summed, company.stops_at = doubts(1), Topic.AUDIT
    company.enter(a_view(1, range(2), joiners=range(2)))
    for walker in company.walkers:
        assert walker.orders(ef.Redo) == [ef.Redo(0)]
        assert walker.status.committed == 0
    company.summed, company.stops_at = (lambda rank, event: event), None
    company.settle()
    for rank, walker in enumerate(company.walkers):
        assert purposes(walker, Purpose.HOSTED) == [rank, rank]
        assert purposes(walker, Purpose.AUDITED) == [1 - rank]
        assert walker.status.committed == 1


def test_a_redo_waits_for_the_task_under_way_and_is_not_forgotten() -> None:
    company = Company(3, StepPolicy(patience=EAGER))
    first = company.walkers[0]
    first.holds = lambda task: task.purpose is Purpose.SPECULATIVE
    company.walkers[2].holds = lambda task: task.purpose is Purpose.HOSTED
    company.stops_at = Topic.VOTE
    company.enter(a_view(1, range(3), joiners=range(3)))
    first.feed(ev.StillAwaited(ViewNumber(1), 0, (2,)))
    assert [task.vrank for task in first.held] == [2]
    company.walkers[2].holds = lambda task: False
    company.walkers[2].finish_held()
    company.summed, company.stops_at = doubts(1), None
    company.settle()
    assert first.orders(ef.Redo) == []
    assert company.walkers[1].orders(ef.Redo) == [ef.Redo(0)]
    company.summed = lambda rank, event: event
    first.finish_held()
    assert first.orders(ef.Redo) == [ef.Redo(0)]
    company.settle()
    assert [w.status.committed for w in company.walkers] == [1, 1, 1]
    assert purposes(first, Purpose.HOSTED) == [0, 0]


def test_a_worker_that_computes_wrongly_twice_leaves_and_nothing_of_it_is_committed() -> None:
    company = Company(3, StepPolicy(audit=1.0, cycle=1))
    liar = company.walkers[2]
    liar.digest = lambda vrank: 7
    company.enter(a_view(1, range(3), joiners=range(3)))
    assert ef.Exit() in liar.done
    for walker in company.walkers[:2]:
        assert ef.Exit() not in walker.done
        assert (walker.status.committed, walker.status.promised) == (0, 1)
        assert [i.wrong for i in walker.status.invalidations] == [(2,)]


def test_in_the_step_after_a_save_every_task_is_computed_twice() -> None:
    """A checkpoint of a wrong state is found in this way before it counts."""
    saves = SavePolicy(enabled=True, every=3, compared=True)
    company = Company(2, StepPolicy(audit=1e-9, cycle=1, saves=saves))
    company.enter(a_view(1, range(2), joiners=range(2)))
    company.until(6)
    for walker in company.walkers:
        audited = [t.step for t in walker.orders(ef.Compute) if t.purpose is Purpose.AUDITED]
        assert audited == [3]


# ---------------------------------------------------------------- speculative tasks


def late_one() -> tuple[Company, Walker, Walker]:
    """Three workers; the last one is late, and the first one copies its task."""
    company = Company(3, StepPolicy(patience=EAGER))
    first, last = company.walkers[0], company.walkers[2]
    last.holds = lambda task: True
    company.enter(a_view(1, range(3), joiners=range(3)))
    first.feed(ev.StillAwaited(ViewNumber(1), 0, (2,)))
    assert purposes(first, Purpose.SPECULATIVE) == [2]
    return company, first, last


def test_a_copy_is_adopted_once_and_only_by_the_host_of_the_virtual_rank() -> None:
    company, first, _ = late_one()
    for walker in company.walkers[:2]:
        walker.feed(ev.GroupBroken(ViewNumber(1), "a peer died"))
    company.enter(a_view(2, range(2), vranks=3))
    assert first.orders(ef.Adopt) == [ef.Adopt(2)]
    assert company.walkers[1].orders(ef.Adopt) == []
    assert purposes(first, Purpose.HOSTED) == [0]
    assert [w.status.committed for w in company.members] == [1, 1]


def test_all_that_a_late_worker_hosts_is_shared_among_the_others() -> None:
    company = Company(3, StepPolicy(patience=EAGER))
    company.walkers[2].holds = lambda task: True
    company.enter(a_view(1, range(3), joiners=range(3), vranks=9))
    for walker in company.walkers[:2]:
        for steps in range(9):  # enough steps for tasks to be copied
            walker.machine.lateness.record_step(steps, tasks=9)
        walker.feed(ev.StillAwaited(ViewNumber(1), 0, (2,)))
        for _ in range(3):  # the members look again, after each copy, which worker is still late
            if walker.take(ef.LookWhoIsLate):
                walker.feed(ev.StillAwaited(ViewNumber(1), 0, (2,)))
    copied = [purposes(walker, Purpose.SPECULATIVE) for walker in company.walkers]
    assert sorted(copied[0] + copied[1]) == [2, 5, 8]
    assert copied[2] == []


def test_nobody_begins_a_copy_in_a_view_that_was_given_up() -> None:
    company = Company(3, StepPolicy(patience=EAGER))
    first, last = company.walkers[0], company.walkers[2]
    last.holds = lambda task: True
    first.holds = lambda task: task.purpose is Purpose.SPECULATIVE
    company.enter(a_view(1, range(3), joiners=range(3), vranks=9))
    for steps in range(9):  # enough steps for tasks to be copied
        first.machine.lateness.record_step(steps, tasks=9)
    first.feed(ev.StillAwaited(ViewNumber(1), 0, (2,)))
    assert len(purposes(first, Purpose.SPECULATIVE)) == 1
    first.feed(ev.GroupBroken(ViewNumber(1), "a peer died"))
    first.finish_held()
    assert len(purposes(first, Purpose.SPECULATIVE)) == 1


def test_a_late_worker_of_an_old_view_is_looked_at_again() -> None:
    company, first, last = late_one()
    last.holds = lambda task: False
    for walker in company.walkers:
        walker.feed(ev.GroupBroken(ViewNumber(1), "a link broke"))
    last.finish_held()
    company.stops_at = Topic.VOTE
    company.enter(a_view(2, range(3)))
    assert purposes(first, Purpose.SPECULATIVE) == [2]


def test_a_contradicted_copy_has_the_step_computed_again() -> None:
    company = Company(2, StepPolicy(patience=EAGER))
    company.summed = lambda rank, event: dataclasses.replace(event, unlike=(1,) * (1 - rank))
    company.stops_at = Topic.VOTE
    company.enter(a_view(1, range(2), joiners=range(2)))
    assert [w.status.reduced for w in company.walkers] == [False, True]
    company.summed, company.stops_at = (lambda rank, event: event), None
    company.settle()
    for walker in company.walkers:
        assert walker.orders(ef.Redo) == [ef.Redo(0)]
        assert walker.status.committed == 1
    story = [event.text for event in company.walkers[0].status.events]
    assert any("copy of virtual rank 1 of step 0 came to other bits" in text for text in story)


@pytest.mark.parametrize(
    ("tolerance", "then"),
    [
        (0.01, "audits compare within 0.01 of a gradient's norm"),
        (0.0, "nothing is audited any more"),
    ],
)
def test_hardware_that_is_not_deterministic_is_asked_for_less(tolerance: float, then: str) -> None:
    company = Company(2, StepPolicy(audit=1.0, audit_tolerance=tolerance))
    company.stops_at = Topic.VOTE
    words = itertools.count(100)  # another one each time
    for walker in company.walkers:
        walker.digest = lambda vrank: next(words)
    company.enter(a_view(1, range(2), joiners=range(2)))
    story = [event.text for event in company.walkers[0].status.events]
    assert [text for text in story if then in text] == story[-1:]


def test_several_machines_that_contradict_themselves_end_the_job_by_its_script() -> None:
    """Only chance in the script explains differences on processors that compute exactly."""
    company = Company(2, StepPolicy(audit=1.0), exact=True)
    words = itertools.count(100)  # another one each time
    for walker in company.walkers:
        walker.digest = lambda vrank: next(words)
    company.enter(a_view(1, range(2), joiners=range(2)))
    for walker in company.walkers:
        (order,) = walker.orders(ef.GiveUp)
        assert order.by_script
        assert "several workers come to other results of the same task in step 0" in order.reason
        assert walker.orders(ef.Commit) == []


def test_a_lone_worker_compares_a_sum_with_its_last_attempt() -> None:
    found = Rulings(WorkerId(0), 4, keeps=True, looks=True)
    found.enter(a_view(1, range(1)))
    for bits in (5, 6):
        assert not found.believes_not_finite(3, bits)
        found.record_doubt(3, [], bits)
    assert found._bits[-1] == 6


# ---------------------------------------------------------------- who counts, saves, stores


def test_dropped_results_are_zeros_and_all_members_agree_on_them() -> None:
    policy = StepPolicy(backup=BackupPolicy(workers=1))
    company = Company(3, policy)
    last = company.walkers[2]
    last.holds = lambda task: True
    company.enter(a_view(1, range(3), joiners=range(3)))
    first, second = company.walkers[:2]
    done = second.take(ef.SendDone)
    assert done is not None
    first.feed(ev.MemberDone(ViewNumber(1), 1, 0, done.samples))
    assert first.take(ef.SendCounted) == ef.SendCounted(ViewNumber(1), 0, (0, 1))
    for walker in (second, last):
        walker.feed(ev.CountSettled(ViewNumber(1), 0, (0, 1)))
    company.settle()
    assert {walker.orders(ef.Reduce)[0].counted for walker in company.walkers} == {(0, 1)}
    assert [w.status.committed for w in company.walkers] == [1, 1, 1]
    assert last.status.phase is Phase.COMPUTING  # its result of the step is not complete


@pytest.mark.parametrize("leaves", [False, True])
def test_a_checkpoint_counts_if_all_its_savers_have_compared(leaves: bool) -> None:
    saves = SavePolicy(enabled=True, every=1, compared=True)
    company = Company(3, StepPolicy(saves=saves, keeps=True, cycle=1, audit=0.0))
    company.enter(a_view(1, range(3), joiners=range(3)))
    company.stops_at = Topic.VOTE
    for walker in company.walkers:
        walker.feed(ev.AtBoundary())
        assert [order.step for order in walker.orders(ef.CopyState)] == [1]
    first = company.walkers[0]
    first.feed(ev.SaveEnded(1, ViewNumber(1), durable=True, first=True))
    assert first.status.saved == 0
    for walker in company.walkers:
        walker.feed(ev.GroupBroken(ViewNumber(1), "a peer died"))
    company.stops_at = None
    company.enter(a_view(2, range(2 if leaves else 3), step=1, vranks=3))
    assert first.status.committed == 2
    assert first.status.saved == (0 if leaves else 1)


def test_a_store_that_stays_silent_is_given_up_with_one_sentence() -> None:
    walker = Walker(0, StepPolicy(keeps=True, restore_s=10.0))
    everyone = [WorkerId(0)]
    for number in range(1, 20):
        walker.install(a_view(number, everyone, step=8, joiners=everyone))
        walker.feed(ev.Connected(ViewNumber(number)))
        view = ViewNumber(number)
        assert walker.take(ef.ObtainState) == ef.ObtainState(STORE, view, 8)
        walker.now += 2.0
        walker.feed(ev.ObtainFailed(STORE, view, "the store does not answer"))
        if walker.orders(ef.GiveUp):
            break
    assert number == 6  # 10 s after the first silence
    (given_up,) = walker.orders(ef.GiveUp)
    assert given_up.reason.startswith("the store does not answer: given up after 10 s")
    assert [event.kind for event in walker.status.events] == ["store"]


def test_a_store_that_has_answered_meanwhile_is_asked_as_long_again() -> None:
    walker = Walker(0, StepPolicy(keeps=True, restore_s=10.0))
    everyone = [WorkerId(0)]
    for number, silent in enumerate((True, False, True, True), start=1):
        view = ViewNumber(number)
        walker.install(a_view(number, everyone, step=8, joiners=everyone))
        walker.feed(ev.Connected(view))
        walker.now += 6.0
        failed = ev.ObtainFailed(STORE, view, "silent")
        walker.feed(failed if silent else ev.StateObtained(STORE, view))
        if not silent:
            walker.feed(ev.GroupBroken(view, "a peer died"))
    assert walker.orders(ef.GiveUp) == []
