"""A table for each rule of views: when one stops, which workers stay, join or are awaited."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.assignment import ONE_MACHINE
from holdfast.engine.core.directives import Move
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.membership import formation as fo
from holdfast.engine.core.membership import view_making as vm
from holdfast.engine.core.membership.changes import OrderNext
from holdfast.engine.core.membership.formation import STEPS_MISSED_MAX
from holdfast.engine.core.membership.view_making import Room
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import LateWorker
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage, WorkerStatus
from roster_kit import LEASE, THREE, Cluster, member, resting, status, stopped, view_of

WAITING, OVERDUE, BOUNDARY = (
    dict(phase=Phase.WAITING),
    dict(phase=Phase.OVERDUE),
    dict(phase=Phase.BOUNDARY),
)

STORED = {step: Recall(base=step, view=0, sources=()) for step in (0, 6)}


def numbers(found: list[WorkerStatus]) -> list[int]:
    return [each.worker for each in found]


def lag(worker: int, committed: int, incarnation: int = 1) -> LateWorker:
    return LateWorker(
        worker=WorkerId(worker), incarnation=Incarnation(incarnation), committed=committed
    )


# ---------------------------------------------------------------- who is fenced


def test_a_dead_worker_is_fenced_at_once_and_a_silent_one_after_its_lease() -> None:
    cluster = Cluster(member(0), member(1, stage=Stage.LOST))
    first, second = view_of(0, 1).members
    heard = cluster.facts(view_of(0, 1))
    assert (heard.is_sound(first), heard.is_fenced(first), heard.can_return(first)) == (
        True,
        False,
        False,
    )
    assert (heard.is_sound(second), heard.is_fenced(second)) == (False, True)
    fence_at = 1.0 + LEASE.fence_s
    for now, witness_at, fenced in (
        (fence_at - 0.1, 0.0, False),
        (fence_at, 0.0, True),
        (fence_at, None, False),  # no member may still act: its view may continue
        (fence_at + 0.9, 2.0, False),
        (fence_at + 1.0, 2.0, True),
        (1.0 + LEASE.abandon_s + LEASE.margin_s, None, True),
    ):
        silent = cluster.facts(view_of(0, 1), 0, now=now, witness_at=witness_at)
        assert silent.is_fenced(first) is fenced
        assert silent.can_return(first) is (now < 1.0 + LEASE.abandon_s + LEASE.margin_s)
    assert not cluster.facts(view_of(0, 1), 1).can_return(second)
    assert cluster.facts(view_of(0, 1)).is_abandoned(second)


# ---------------------------------------------------------------- who may join


@pytest.mark.parametrize(
    ("heard", "joins"),
    [
        (status(4), True),
        (status(4, stage=Stage.BOOTING), False),
        (status(4, state=ReplicaStage.OBTAINING), True),
        (status(4, state=ReplicaStage.CURRENT), False),
        (status(4, committed=3), False),  # it had begun to catch up
        (status(4, incarnation=2), False),  # a newer incarnation is ordered
    ],
)
def test_a_worker_that_is_ready_and_holds_no_state_may_join(
    heard: WorkerStatus, joins: bool
) -> None:
    cluster = Cluster(member(0), status(4))
    cluster.hear("n4", heard)
    facts = cluster.facts(view_of(0))
    assert numbers(fo.candidates(facts)) == ([4] if joins else [])
    assert fo.candidates(cluster.facts(view_of(0), 4)) == []
    cluster.drain(facts.roster.slots[WorkerId(4)].agent)
    assert fo.candidates(facts) == []


def test_a_member_without_the_state_may_join_once_it_has_given_the_view_up() -> None:
    joiner = dict(state=ReplicaStage.ABSENT, committed=0)
    for heard, joins in ((member(1, **joiner), []), (stopped(1, **joiner), [1])):
        cluster = Cluster(member(0), heard)
        assert numbers(fo.candidates(cluster.facts(view_of(0, 1)))) == joins


def test_candidates_come_in_order() -> None:
    assert numbers(fo.candidates(Cluster(status(2), status(0), status(1)).facts())) == [0, 1, 2]


def test_workers_on_a_node_that_another_is_moved_to_come_first() -> None:
    cluster = Cluster(status(0), status(1), status(2))
    cluster.hear(
        "n0",
        status(0),
        leaving=(Move(worker=WorkerId(0), incarnation=Incarnation(1), to=AgentId("n2")),),
    )
    facts = cluster.facts()
    awaited = [w for w in (0, 1, 2) if facts.roster.awaits_worker(AgentId(f"n{w}"))]
    assert awaited == [2]
    assert numbers(fo.candidates(facts)) == [2, 0, 1]


@pytest.mark.parametrize(
    ("heard", "step", "returns"),
    [
        (member(1, **WAITING), 8, True),
        (resting(1), 8, True),
        (member(1), 8, False),  # it still computes
        (member(1, state=ReplicaStage.OBTAINING, **WAITING), 8, False),
        (member(1, stage=Stage.LOST, **WAITING), 8, False),
        (member(1, **WAITING), 5 + STEPS_MISSED_MAX, True),
        (member(1, **WAITING), 6 + STEPS_MISSED_MAX, False),
        (member(1, incarnation=2, **WAITING), 8, False),
    ],
)
def test_a_suspended_worker_returns_once_its_late_task_is_done(
    heard: WorkerStatus, step: int, returns: bool
) -> None:
    cluster = Cluster(member(0), member(1))
    cluster.hear("n1", heard)
    view = view_of(0, suspended=(lag(1, 5),))
    assert fo.find_returning(cluster.facts(view), step) == ([lag(1, 5)] if returns else [])
    assert fo.find_returning(cluster.facts(view, 1), step) == []
    assert fo.find_returning(cluster.facts(view_of(0)), step) == []
    assert fo.find_returning(cluster.facts(), step) == []
    cluster.put(1, further=(AgentId("n5"),))
    assert fo.find_returning(cluster.facts(view, 5), step) == []  # one of its nodes is silent


def test_a_worker_that_has_missed_too_much_is_better_replaced() -> None:
    view = view_of(0, suspended=(lag(1, 5),))
    cluster = Cluster(member(0), member(1))
    for step, behind in ((5 + STEPS_MISSED_MAX, []), (6 + STEPS_MISSED_MAX, [1])):
        assert numbers(fo.find_too_far_behind(cluster.facts(view), step)) == behind
    cluster.hear("n1", member(1, stage=Stage.LOST))
    assert fo.find_too_far_behind(cluster.facts(view), 500) == []
    assert fo.find_too_far_behind(cluster.facts(), 500) == []


# ---------------------------------------------------------------- who is late


@pytest.mark.parametrize(
    ("survivors", "late"),
    [
        ([stopped(0, **OVERDUE), stopped(1)], [1]),
        ([stopped(0, **WAITING), stopped(1)], []),  # no member reports that it is late
        ([stopped(0, **OVERDUE), stopped(1), stopped(2)], []),  # the late ones are the majority
        ([stopped(0, **OVERDUE), stopped(1, **WAITING), stopped(2), stopped(3)], [2, 3]),
        ([stopped(0, **OVERDUE), stopped(1, reduced=True), stopped(2)], [2]),
        ([stopped(0, **OVERDUE), stopped(1, **BOUNDARY)], []),  # the late one is in no step
        ([stopped(0, committed=6, **OVERDUE), stopped(1)], []),  # the step is committed
    ],
)
def test_workers_are_late_if_they_compute_while_at_least_as_many_wait(
    survivors: list[WorkerStatus], late: list[int]
) -> None:
    assert numbers(fo.workers_to_suspend(survivors)) == late


# ---------------------------------------------------------------- when a view must stop

BROKEN = [
    ((member(0), member(1)), None),
    ((member(0), member(1, stage=Stage.LOST)), "worker 1 is gone"),
    ((member(0), stopped(1)), "worker 1 has left it"),
    ((member(0), stopped(1, state=ReplicaStage.DISTRUSTED)), "something wrong was used"),
    ((member(0), member(1, state=ReplicaStage.DISTRUSTED)), "something wrong was used"),
    ((member(0, **OVERDUE), member(1)), "worker 0 waits for worker 1, which is late"),
    ((member(0, **OVERDUE), member(1, phase=Phase.OVERDUE)), "0 waits for one that is late"),
    ((member(0, **WAITING), resting(1)), "a worker waits for one that has stopped"),
    ((member(0), resting(1)), None),  # a planned stop: no member waits
    ((member(0, **WAITING), resting(1, committed=4)), "worker 1 has left it"),  # before any vote
    ((resting(0), resting(1)), None),
]


@pytest.mark.parametrize(("statuses", "why"), BROKEN)
def test_a_view_stops_when_a_member_is_gone_or_wrong_or_keeps_others_waiting(
    statuses: tuple[WorkerStatus, ...], why: str | None
) -> None:
    facts = Cluster(*statuses).facts(view_of(0, 1))
    found = fo.reason_to_stop(facts, 5.0, 5.0, minds_late=True)
    assert (found is None) if why is None else (why in str(found))
    assert fo.reason_to_stop(Cluster(*statuses).facts(), 5.0, 5.0) is None


def test_all_late_workers_are_named() -> None:
    facts = Cluster(member(0, **OVERDUE), member(1), member(2)).facts(view_of(0, 1, 2))
    told = "worker 0 waits for workers 1, 2, which are late"
    assert fo.reason_to_stop(facts, 5.0, 5.0, minds_late=True) == told


def test_a_planned_stop_is_waited_for_and_the_late_only_where_that_is_allowed() -> None:
    waits = Cluster(member(0, **WAITING), resting(1)).facts(view_of(0, 1))
    assert fo.reason_to_stop(waits, 4.9, 5.0) is None
    overdue = Cluster(member(0, **OVERDUE), member(1)).facts(view_of(0, 1))
    assert fo.reason_to_stop(overdue, 5.0, 5.0, minds_late=False) is None


def test_a_silent_node_stops_the_view_if_others_can_go_on() -> None:
    cluster = Cluster(member(0), member(1))
    one = cluster.facts(view_of(0, 1), 1)
    assert fo.reason_to_stop(one, 0.0, 5.0) == "node n1 has not been heard for a while"
    assert fo.reason_to_stop(cluster.facts(view_of(0, 1), 0, 1), 0.0, 5.0) is None


# ---------------------------------------------------------------- planned changes


def test_a_change_is_planned_for_joiners_then_for_drains_then_for_too_few() -> None:
    cluster = Cluster(member(0), member(1), status(4))
    facts = cluster.facts(view_of(0, 1))
    assert fo.choose_change(with_room(facts, 3), 1, 5) == ("join", "worker 4 joins")
    assert fo.choose_change(with_room(facts, 2), 1, 5) is None  # no virtual rank is left for it
    assert fo.choose_change(with_room(facts, 2), 3, 5) == ("wait", "the job waits")
    assert fo.choose_change(with_room(facts, 2), 2, 5) is None
    for name in ("n0", "n1"):
        cluster.drain(name)
        expected = ("drain", f"node n0 is left ({'asked'})")
        assert fo.choose_change(with_room(facts, 2), 3, 5) == expected
    view = view_of(0, suspended=(lag(1, 5),))
    back = Cluster(member(0), member(1, **WAITING)).facts(view)
    assert fo.choose_change(with_room(back, 2), 1, 8) == ("join", "worker 1 joins")
    assert fo.choose_change(with_room(back, 1), 1, 8) is None
    waits = dataclasses.replace(with_room(back, 2), held_back=frozenset({WorkerId(1)}))
    assert fo.choose_change(waits, 1, 8) is None
    assert fo.choose_change(waits, 2, 8) == ("join", "worker 1 joins")  # the job waits for it


def test_a_node_is_left_only_if_others_can_go_on() -> None:
    cluster = Cluster(member(0), member(1))
    facts = cluster.facts(view_of(0, 1))
    assert fo.find_leaving(facts, 1) == {}
    cluster.drain("n0")
    assert fo.find_leaving(facts, 1) == {"node n0": "asked"}
    cluster.drain("n1", "disk")
    assert fo.find_leaving(facts, 1) == {}  # no member would be left
    joined = Cluster(member(0), status(4))
    joined.drain("n0")
    assert fo.find_leaving(joined.facts(view_of(0)), 1) == {"node n0": "asked"}


# ---------------------------------------------------------------- who survives


def test_survivors_hold_the_state_and_nobody_may_act_any_more() -> None:
    cluster = Cluster(
        stopped(0), stopped(1, state=ReplicaStage.OBTAINING), member(2, stage=Stage.LOST)
    )
    view = view_of(0, 1, 2)
    assert numbers(fo.survivors_of(cluster.facts(view)) or []) == [0]
    assert fo.survivors_of(cluster.facts(view, 0)) is None  # it may still act
    cluster.hear("n1", member(1))
    assert fo.survivors_of(cluster.facts(view)) is None  # it has not promised
    cluster.hear("n1", stopped(1, incarnation=2))
    found = fo.survivors_of(cluster.facts(view))
    assert numbers(found or []) == [0]  # its process was replaced
    cluster.change(OrderNext(WorkerId(0)))
    assert fo.survivors_of(cluster.facts(view)) == []  # its agent ends it
    assert fo.survivors_of(cluster.facts()) == []


def test_a_worker_that_has_not_begun_to_catch_up_holds_an_older_state() -> None:
    view = view_of(0, 1, joiners=(WorkerId(1),), catching_up=(lag(1, 2),))
    older = stopped(1, view=ViewNumber(2), committed=2)
    begun = stopped(1, state=ReplicaStage.CURRENT)
    for one, survivors in ((older, [0]), (begun, [0, 1])):
        cluster = Cluster(stopped(0), one)
        assert numbers(fo.survivors_of(cluster.facts(view)) or []) == survivors


def test_a_member_that_had_to_stop_while_it_caught_up_is_interrupted() -> None:
    view = view_of(0, 1, joiners=(WorkerId(1),), catching_up=(lag(1, 2),))
    for one, found in (
        (stopped(1, state=ReplicaStage.OBTAINING), [1]),
        (member(1, state=ReplicaStage.OBTAINING), []),  # it is still running
        (stopped(1), []),  # it has the state
        (stopped(1, state=ReplicaStage.OBTAINING, stage=Stage.LOST), []),
    ):
        facts = Cluster(stopped(0, state=ReplicaStage.OBTAINING), one).facts(view)
        assert numbers(fo.interrupted_members(facts)) == found
    assert fo.interrupted_members(Cluster(stopped(0)).facts()) == []


def test_nobody_begins_from_a_state_that_is_discarded() -> None:
    wrong = stopped(1, state=ReplicaStage.DISTRUSTED)
    cluster = Cluster(stopped(0), wrong)
    assert fo.is_state_discarded(cluster.facts(view_of(0, 1)))
    cluster.change(OrderNext(WorkerId(1)))
    assert not fo.is_state_discarded(cluster.facts(view_of(0, 1)))
    assert not fo.is_state_discarded(Cluster(stopped(0)).facts(view_of(0)))


def test_the_view_is_surely_the_newest_if_all_its_members_are_heard_of_and_well() -> None:
    view = view_of(0, 1)
    for second, sure in (
        (member(1), True),
        (member(1, stage=Stage.EXITED), True),
        (member(1, stage=Stage.LOST), False),
        (member(1, incarnation=2), False),
    ):
        assert fo.is_surely_newest(Cluster(member(0), second).facts(view)) is sure
    assert not fo.is_surely_newest(Cluster(member(0)).facts(view))
    assert not fo.is_surely_newest(Cluster(member(0)).facts())


# ---------------------------------------------------------------- the next view


def with_room(facts: fo.Facts, hosts: int, spares: int = 0) -> fo.Facts:
    return dataclasses.replace(facts, room=Room(hosts=hosts, spares=spares))


def following(cluster: Cluster, view: Any, *, vranks: int = 4, **fields: Any) -> Any:
    owners = tuple(view.workers[v % len(view.workers)] for v in range(vranks))
    facts = cluster.facts(dataclasses.replace(view, owners=owners))
    survivors = fo.survivors_of(facts)
    assert survivors is not None
    workers_min = fields.pop("workers_min", 1)
    return fo.propose_view(with_room(facts, vranks), survivors, workers_min, **fields)


def test_at_rest_waiting_workers_join_as_far_as_there_are_virtual_ranks() -> None:
    cluster = Cluster(resting(0), resting(1), status(4), status(5))
    found = following(cluster, view_of(0, 1), vranks=3)
    assert (found.workers, found.joiners, found.resume_step) == ((0, 1, 4), (4,), 5)
    assert sorted(found.owners) == [0, 1, 4]
    assert found.why == "worker 4 joins"
    running = following(Cluster(stopped(0), resting(1), status(4)), view_of(0, 1), vranks=3)
    assert (running.workers, running.joiners) == ((0, 1), ())


def test_at_rest_drained_nodes_are_left_but_not_while_others_come_back() -> None:
    cluster = Cluster(resting(0), resting(1))
    cluster.drain("n1")
    found = following(cluster, view_of(0, 1))
    assert (found.workers, found.why) == ((0,), "worker 1 leaves")
    cluster.drain("n0")
    assert following(cluster, view_of(0, 1)).workers == (0, 1)  # one member must hold the state
    mid = Cluster(stopped(0), resting(1))
    mid.drain("n1")
    assert following(mid, view_of(0, 1)).workers == (0, 1)  # a step is under way


def test_at_rest_the_job_waits_for_enough_workers_and_in_a_step_it_goes_on() -> None:
    assert following(Cluster(resting(0)), view_of(0), workers_min=2) is None
    assert following(Cluster(resting(0), status(4)), view_of(0), workers_min=2) is not None
    assert following(Cluster(stopped(0)), view_of(0), workers_min=2) is not None


def test_a_late_worker_is_suspended_where_that_is_allowed() -> None:
    cluster = Cluster(stopped(0, **OVERDUE), stopped(1, hosted=(1, 2)))
    view = view_of(0, 1)
    found = following(cluster, view, vranks=3, minds_late=True)
    assert (found.workers, found.suspended, found.redone) == ((0,), (lag(1, 5),), 2)
    assert found.owners == (0, 0, 0)
    assert "worker 1 is late in step 5" in found.why
    assert following(cluster, view).suspended == ()


def test_a_suspended_worker_returns_if_all_keepers_of_its_steps_are_there() -> None:
    view = view_of(0, 2, suspended=(lag(1, 3),))
    there = Cluster(resting(0), resting(2), resting(1))
    found = following(there, view, vranks=3)
    assert (found.workers, found.joiners) == ((0, 1, 2), (1,))
    assert found.catching_up == (lag(1, 3),)
    gone = Cluster(resting(0), member(2, stage=Stage.LOST), resting(1))
    assert following(gone, view, vranks=3).workers == (0,)
    full = following(there, view, vranks=2)
    assert (full.workers, full.catching_up) == ((0, 2), ())


def test_a_returning_worker_goes_before_a_new_one() -> None:
    view = view_of(0, suspended=(lag(1, 3),))
    found = following(Cluster(resting(0), resting(1), status(4)), view, vranks=2)
    assert found.workers == (0, 1)


def test_a_step_committed_by_a_member_that_is_left_out_is_not_redone() -> None:
    """It is late, or its process has ended: all had the sum when it committed."""
    cluster = Cluster(stopped(0, reduced=True), stopped(1, reduced=True), stopped(2, committed=6))
    view = view_of(0, 1, 2)
    survivors = [s for s in cluster.roster.newest.values() if s.worker != 2]
    for propose in (
        lambda: fo.propose_view(with_room(cluster.facts(view), 3), survivors, 1),
        lambda: fo.propose_last_view(cluster.facts(view), survivors),
    ):
        found = propose()
        assert found is not None
        assert found.resume_step == 6
    older = stopped(2, committed=6, view=ViewNumber(2))  # its report is about another history
    cluster.hear("n2", older)
    found = fo.propose_view(with_room(cluster.facts(view), 3), survivors, 1)
    assert found is not None
    assert found.resume_step == 5


def test_members_may_have_agreed_on_other_owners_and_the_furthest_knows() -> None:
    view = view_of(0, 1, 2)
    behind = stopped(0, committed=4, reduced=True, hosted=(0, 1))
    ahead = stopped(1, committed=5, hosted=(1, 2))
    older = stopped(2, view=ViewNumber(2), hosted=(0, 1, 2))
    assert fo.present_owners(view, [ahead, behind, older]) == (0, 1, 1)


# ---------------------------------------------------------------- the beginning and the end


def test_all_are_waited_for_at_first_and_after_that_enough() -> None:
    cluster = Cluster(status(0), status(1, stage=Stage.BOOTING), status(4))
    facts = cluster.facts()
    assert fo.choose_beginners(facts, 1, None) == []
    assert numbers(fo.choose_beginners(facts, 1, 2)) == [0, 4]
    assert fo.choose_beginners(facts, 1, 3) == []
    cluster.put(1, respawn_at=cluster.now + fo.QUARANTINED_S)
    assert fo.choose_beginners(facts, 1, None) == []
    cluster.put(1, respawn_at=cluster.now + fo.QUARANTINED_S + 1)
    assert numbers(fo.choose_beginners(facts, 1, None)) == [0, 4]
    cluster.put(1, respawn_at=None)
    cluster.hear("n1", status(1, stage=Stage.EXITED))
    assert numbers(fo.choose_beginners(facts, 1, None)) == [0, 4]
    cluster.hear("n4", status(4, state=ReplicaStage.OBTAINING))
    assert fo.choose_beginners(facts, 1, None) == []


def test_nobody_waits_for_silent_nodes_where_enough_others_are_there() -> None:
    cluster = Cluster(status(0), status(1, stage=Stage.BOOTING), status(4))
    facts = cluster.facts(None, 1)
    assert numbers(fo.choose_beginners(facts, 2, None)) == [0, 4]
    assert fo.choose_beginners(facts, 3, None) == []


def test_a_first_view_hosts_all_and_says_from_where() -> None:
    ready = [status(w) for w in (2, 5, 7)]
    fresh = vm.initial_view(ready, Room(hosts=2), 2, STORED[0], "", ONE_MACHINE)
    assert (fresh.workers, fresh.owners, fresh.why) == ((2, 5), (2, 5), "the job starts")
    assert fresh.joiners == fresh.workers
    again = vm.initial_view(ready, Room(hosts=4), 4, STORED[6], "lost", ONE_MACHINE)
    assert again.owners == (2, 2, 5, 7)
    assert (again.resume_step, again.why) == (6, "lost: from the checkpoint of step 6")
    assert (
        vm.initial_view(ready, Room(hosts=4), 4, STORED[0], "lost", ONE_MACHINE).why
        == "lost: from step 0 again"
    )


def test_workers_with_dirty_or_foreign_state_are_replaced_before_the_job_begins() -> None:
    cluster = Cluster(
        status(3, state=ReplicaStage.OBTAINING),
        status(1, state=ReplicaStage.CURRENT),
        status(2, state=ReplicaStage.DISTRUSTED, stage=Stage.BOOTING),
        status(0),
    )
    found = fo.find_dirty(cluster.facts(), replicated=True)
    assert numbers([s for s, _ in found]) == [1, 3]
    assert {why for _, why in found} == {"its state is neither initial nor the job's"}
    (share, _), (dirty, _) = fo.find_dirty(cluster.facts(), replicated=False)
    assert (share.worker, dirty.worker) == (1, 3)


def test_a_view_keeps_its_leader_as_long_as_it_holds_the_state() -> None:
    cluster = Cluster(resting(0), resting(1), status(4))
    for old, leader in (
        (view_of(1, 0, leader=WorkerId(1)), 1),
        (view_of(0, 4, leader=WorkerId(4)), 0),  # it joins, and may have lost the state
        (view_of(9), 0),
        (None, 0),
    ):
        proposal = following(cluster, view_of(0, 1), vranks=3)
        view = vm.make_view(proposal, ViewNumber(7), old, cluster.roster)
        assert (view.number, view.leader) == (7, leader)
        assert [(m.worker, m.agent) for m in view.members] == [(0, "n0"), (1, "n1"), (4, "n4")]
    first = vm.initial_view([status(4)], Room(hosts=1), 1, STORED[0], "", ONE_MACHINE)
    assert vm.make_view(first, THREE, None, cluster.roster).leader == 4


@given(st.integers(0, 3))
def test_the_last_view_waits_for_nobody(missing: int) -> None:
    statuses = [stopped(w, committed=5, reduced=True) for w in range(4) if w != missing]
    cluster = Cluster(*statuses, status(5))
    found = fo.propose_last_view(cluster.facts(view_of(0, 1, 2, 3)), statuses)
    assert set(found.workers) == set(found.owners) == {0, 1, 2, 3} - {missing}
    assert (found.resume_step, found.joiners) == (5, ())  # the lost worker may not have reduced it


def test_a_view_with_repeated_members_or_wrong_owners_breaks_an_invariant() -> None:
    vm.check_view(view_of(0, 1), 2)
    for view, vranks in (
        (view_of(0, 0), 2),
        (view_of(0, 1, owners=(WorkerId(0), WorkerId(7))), 2),
        (view_of(0, 1), 3),
    ):
        with pytest.raises(InvariantError):
            vm.check_view(view, vranks)


def test_only_links_of_the_present_view_count_as_broken() -> None:
    for view, left_out in ((THREE, [WorkerId(1)]), (ViewNumber(2), [])):
        names = member(0, unreached=(WorkerId(1),), view=view)
        facts = Cluster(names, member(1), member(2)).facts(view_of(0, 1, 2))
        assert fo.choose_unreachable(facts) == left_out
    assert (
        fo.choose_unreachable(Cluster(member(0)).facts(view_of(0, 1))) == []
    )  # worker 1 has never reported
