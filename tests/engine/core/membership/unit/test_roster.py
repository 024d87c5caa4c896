"""The coordinator's knowledge of nodes and processes: restarts, and the facts it remembers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.membership.admission import admit, drain, recall_slots, welcome
from holdfast.engine.core.membership.changes import AddSlot, DismissNode, OrderNext, PutSlot
from holdfast.engine.core.membership.durable import KNOWN_MAX, Durable, speakers
from holdfast.engine.core.membership.event_log import EventLog
from holdfast.engine.core.membership.facts import silent_nodes
from holdfast.engine.core.membership.job_end import Stopping
from holdfast.engine.core.membership.live_roster import LiveRoster, News
from holdfast.engine.core.membership.outbox import list_finishing, list_wanted
from holdfast.engine.core.membership.restart import quarantine, quarantine_wrong, replace_lost
from holdfast.engine.core.membership.roster import (
    SlotState,
    describe_nodes,
    have_all_ended,
    have_all_exited,
)
from holdfast.engine.core.policies import CoordinatorPolicy, RestartPolicy
from holdfast.engine.core.types import AgentId, Incarnation, ProcessRole, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import JobEvent, Phase, ReplicaStage, Stage, WorkerStatus
from roster_kit import LEASE, THREE, Cluster, invalid, member, status, stopped, view_of

N0, N1, N2 = AgentId("n0"), AgentId("n1"), AgentId("n2")
ZERO, ONE, TWO = WorkerId(0), WorkerId(1), WorkerId(2)
AT_MOST_TWO = CoordinatorPolicy(virtual_ranks=2, nodes_max=2)


def wanted(cluster: Cluster, name: AgentId, view: Any = None) -> list[tuple[int, int]]:
    return [(w.worker, w.incarnation) for w in list_wanted(cluster.roster, name, view)]


# ---------------------------------------------------------------- hearing


def test_an_old_or_repeated_report_is_stale_and_a_new_agent_starts_fresh() -> None:
    cluster = Cluster(status(0))
    seq = cluster.roster.nodes[N0].report.seq
    cluster.now = 5.0
    assert cluster.hear("n0", seq=seq) is News.STALE
    assert cluster.hear("n0", seq=seq - 1) is News.STALE
    assert cluster.roster.nodes[N0].heard_at == 1.0
    assert cluster.hear("n0", status(0), seq=seq + 1) is News.NOTHING
    assert cluster.roster.nodes[N0].heard_at == 5.0
    assert cluster.hear("n0", seq=1, incarnation=Incarnation(2)) is News.CHANGE
    assert cluster.roster.nodes[N0].fresh
    assert cluster.hear("n0", seq=99, incarnation=Incarnation(1)) is News.STALE


@pytest.mark.parametrize(
    "change",
    [
        dict(stage=Stage.FAILED),
        dict(view=ViewNumber(4)),
        dict(promised=ViewNumber(3)),
        dict(state=ReplicaStage.OBTAINING),
        dict(phase=Phase.OVERDUE),
        dict(phase=Phase.ENDED),
        dict(loop=2),
        dict(unreached=(ONE,)),
        dict(saved=5),
        dict(unreadable=5),
        dict(events=(JobEvent(number=1, kind="x", text="y"),)),
        dict(incarnation=Incarnation(2)),
    ],
)
def test_a_report_that_can_change_a_decision_is_a_change(change: dict[str, Any]) -> None:
    cluster = Cluster(member(0))
    assert cluster.hear("n0", dataclasses.replace(member(0), **change)) is News.CHANGE


@pytest.mark.parametrize(
    "change", [dict(committed=6), dict(reduced=True), dict(phase=Phase.WAITING)]
)
def test_progress_is_a_change_only_for_stopped_workers(change: dict[str, Any]) -> None:
    for one, news in ((member(0), News.NOTHING), (stopped(0), News.CHANGE)):
        cluster = Cluster(one)
        assert cluster.hear("n0", dataclasses.replace(one, **change)) is news


@pytest.mark.parametrize("fields", [dict(slots=2), dict(draining="disk"), dict(failing="disk")])
def test_another_offer_or_request_of_a_node_is_a_change(fields: dict[str, Any]) -> None:
    cluster = Cluster(status(0))
    assert cluster.hear("n0", status(0), **fields) is News.CHANGE
    node = cluster.roster.nodes[N0]
    offers = {each: getattr(node.report, each) for each in ("slots", "draining", "failing")}
    assert offers.items() >= fields.items()
    assert cluster.hear("n0", status(0), **fields) is News.NOTHING
    assert cluster.hear("n0", **fields) is News.CHANGE  # a process is missing


def test_the_job_moves_when_a_process_comes_further_or_begins_or_ends_to_wait() -> None:
    cluster = Cluster(member(0))
    assert cluster.roster.moved_at == 0.0
    for at, fields in enumerate((dict(committed=6), dict(phase=Phase.WAITING)), start=5):
        cluster.now = float(at)
        cluster.hear("n0", member(0, **fields))
        assert cluster.roster.moved_at == at
    cluster.now = 9.0
    cluster.hear("n0", member(0, phase=Phase.OVERDUE))  # it is waiting already
    assert cluster.roster.moved_at == 6.0
    cluster.hear("n0", member(0, incarnation=2, committed=0))
    assert cluster.roster.moved_at == 6.0


# ---------------------------------------------------------------- slots


def test_numbers_of_workers_are_never_given_twice() -> None:
    cluster = Cluster(status(0), status(1))
    cluster.change(DismissNode(N1))
    assert list(cluster.roster.slots) == [0]
    assert cluster.roster.status(ONE) is None
    assert cluster.roster.workers_of(N1) == ()
    cluster.hear("n1", slots=2)
    for _ in range(2):  # it keeps the slots it has
        cluster.change(*admit(cluster.facts(), AT_MOST_TWO)[1])
        assert cluster.roster.workers_of(N1) == (2, 3)
    assert cluster.roster.workers_named == 4


def test_recorded_slots_are_known_again_and_their_losses_were_counted() -> None:
    slot = Slot(worker=ONE, agent=N1, incarnation=Incarnation(4))
    roster = LiveRoster(JobRecord(term=1, slots=(slot,), workers_named=7), 3.0)
    assert roster.slot_records() == (slot,)
    assert (roster.workers_named, roster.unheard_nodes(), roster.heard_at(N1)) == (7, [N1], 3.0)
    assert roster.slots[ONE].counted == 3
    roster.apply(OrderNext(ONE))
    assert roster.slot_records() == (dataclasses.replace(slot, incarnation=Incarnation(5)),)


def test_a_slot_that_is_ordered_again_gets_the_next_incarnation_at_once() -> None:
    cluster = Cluster(status(0))
    cluster.put(0, respawn_at=9.0)
    assert wanted(cluster, N0) == []
    cluster.change(OrderNext(ZERO))
    slot = cluster.roster.slots[ZERO]
    assert (slot.incarnation, slot.respawn_at) == (2, None)
    assert wanted(cluster, N0) == [(0, 2)]
    cluster.roster.first = Incarnation(1001)  # numbers that may be in use are passed over
    cluster.change(OrderNext(ZERO))
    assert wanted(cluster, N0) == [(0, 1001)]


def test_on_a_node_that_is_drained_only_members_go_on() -> None:
    cluster = Cluster(member(0), status(1))
    cluster.hear("n0", member(0), draining="asked to")
    cluster.hear("n1", status(1), draining="asked to")
    assert drain(cluster.facts(view_of(0)))[0] == ""
    cluster.change(*drain(cluster.facts(view_of(0)))[1])
    assert wanted(cluster, N0, view_of(0)) == [(0, 1)]
    assert wanted(cluster, N1, view_of(0)) == []
    assert cluster.roster.slots[ONE].incarnation == 2  # the present one is to end
    assert wanted(cluster, N0, None) == []


def test_as_the_job_ends_living_members_may_finish() -> None:
    cluster = Cluster(member(0), member(1, stage=Stage.EXITED), status(2))
    view = view_of(0, 1)
    found = [list(list_finishing(cluster.roster, name, view)) for name in (N0, N1, N2)]
    assert [len(each) for each in found] == [1, 0, 0]
    assert (found[0][0].worker, found[0][0].incarnation) == (0, 1)
    assert found[0][0].role is ProcessRole.WORKER
    assert list(list_finishing(cluster.roster, N0, None)) == []


def test_as_the_job_ends_a_member_that_never_got_the_state_is_ended() -> None:
    """It has given up the view, and the only member with the state has gone."""
    view = view_of(0, 1)
    for state, promised, stays in (
        (ReplicaStage.ABSENT, THREE, False),
        (ReplicaStage.ABSENT, ViewNumber(2), True),  # its group still stands
        (ReplicaStage.CURRENT, THREE, True),
    ):
        ended = status(0, stage=Stage.EXITED)
        cluster = Cluster(ended, member(1, state=state, promised=promised))
        found = list(list_finishing(cluster.roster, N1, view))
        assert [each.worker for each in found] == ([1] if stays else [])


def test_an_agent_that_began_anew_gets_its_workers_anew_unless_they_still_count_as_members() -> (
    None
):
    cluster = Cluster(status(0), status(1), member(2))
    for name in (N0, N1, N2):
        began = dict(incarnation=Incarnation(2), seq=1)
        cluster.hear(name, *([status(0)] if name == N0 else []), **began)
        assert cluster.roster.nodes[name].fresh
    cluster.change(*welcome(cluster.facts(view_of(2)), recall=False))
    assert not any(node.fresh for node in cluster.roster.nodes.values())
    assert [cluster.roster.slots[w].incarnation for w in (ZERO, ONE, TWO)] == [1, 2, 1]


def test_after_the_loss_of_the_record_what_runs_is_known_from_the_agents() -> None:
    cluster = Cluster()
    view = view_of(0, 1)

    def recall(name: str, incarnation: int, view: View | None) -> None:
        running = [member(0, incarnation=incarnation)]
        cluster.change(*recall_slots(cluster.roster, AgentId(name), running, view))

    cluster.hear("n0", member(0, incarnation=5))
    recall("n0", 5, view)
    assert {w: (s.agent, s.incarnation) for w, s in cluster.roster.slots.items()} == {
        0: ("n0", 5),
        1: ("n1", 1),
    }
    recall("n0", 4, view)
    assert cluster.roster.slots[ZERO].incarnation == 5
    recall("n2", 9, None)  # its place is on another node
    assert cluster.roster.slots[ZERO].incarnation == 5


# ---------------------------------------------------------------- knowing


@pytest.mark.parametrize(
    ("heard", "dead"),
    [
        (member(0), False),
        (member(0, stage=Stage.BOOTING), False),
        (member(0, stage=Stage.LOST), True),
        (member(0, stage=Stage.FAILED), True),
        (member(0, stage=Stage.EXITED), True),
        (member(0, incarnation=2), True),
        (member(0, incarnation=0), False),  # older news: its process is not started yet
    ],
)
def test_a_worker_is_dead_if_its_process_was_said_to_have_ended(
    heard: WorkerStatus, dead: bool
) -> None:
    cluster = Cluster(member(0))
    cluster.hear("n0", heard)
    assert cluster.roster.is_dead(ZERO, Incarnation(1)) is dead


def test_a_process_that_a_speaking_agent_does_not_name_is_dead() -> None:
    cluster = Cluster(member(0))
    cluster.hear("n0")
    assert cluster.roster.is_dead(ZERO, Incarnation(1))
    assert cluster.roster.is_dead(WorkerId(7), Incarnation(1))  # it has no slot
    unheard = LiveRoster(
        JobRecord(term=1, slots=(Slot(worker=ZERO, agent=N0, incarnation=1),)), 0.0
    )
    assert not unheard.is_dead(ZERO, Incarnation(1))


def test_only_the_ordered_incarnation_is_wanted() -> None:
    cluster = Cluster(member(0))
    assert cluster.roster.is_ordered(member(0))
    assert not cluster.roster.is_ordered(member(0, incarnation=2))
    assert not cluster.roster.is_ordered(member(3))
    assert cluster.roster.status(ZERO, Incarnation(1)) == member(0)
    assert cluster.roster.status(ZERO, Incarnation(2)) is None
    assert cluster.roster.status(ZERO) == member(0)
    cluster.put(0, respawn_at=3.0)
    assert not cluster.roster.is_ordered(member(0))


def test_the_job_is_over_once_all_that_lives_has_ended_or_must_have() -> None:
    cluster = Cluster(member(0), member(1, stage=Stage.EXITED))
    assert not have_all_ended(cluster.roster, 1.0, LEASE.fence_s)
    assert not have_all_ended(cluster.roster, 3.4, LEASE.fence_s)
    assert have_all_ended(
        cluster.roster, 3.5, LEASE.fence_s
    )  # after such a silence it has ended itself
    cluster.hear("n0", member(0, stage=Stage.LOST))
    assert not have_all_ended(
        cluster.roster, 1.0, LEASE.fence_s
    )  # a process ordered there may still start
    cluster.hear("n0", member(0, stage=Stage.LOST), ending=True)
    assert not have_all_ended(cluster.roster, 1.0, LEASE.fence_s)
    cluster.hear("n1", member(1, stage=Stage.EXITED), ending=True)
    assert have_all_ended(cluster.roster, 1.0, LEASE.fence_s)
    cluster.hear("n1", member(1), ending=True)
    assert not have_all_ended(cluster.roster, 1.0, LEASE.fence_s)
    cluster.hear("n1", member(1, stage=Stage.EXITED), ending=True)
    record = JobRecord(term=1, slots=(Slot(worker=ZERO, agent=N0, incarnation=Incarnation(1)),))
    unheard = LiveRoster(record, 10.0)
    assert not have_all_ended(unheard, 12.4, LEASE.fence_s)
    assert have_all_ended(unheard, 12.5, LEASE.fence_s)


def test_all_have_exited_if_every_slots_worker_has() -> None:
    cluster = Cluster(member(0, stage=Stage.EXITED), member(1))
    assert not have_all_exited(cluster.roster)
    cluster.hear("n1", member(1, stage=Stage.EXITED))
    assert have_all_exited(cluster.roster)
    cluster.hear("n1")
    assert not have_all_exited(cluster.roster)
    assert not have_all_exited(Cluster().roster)


def test_a_snapshot_shows_nodes_in_order() -> None:
    cluster = Cluster(member(1), member(0))
    cluster.hear("n0", member(0), pid=12)
    cluster.drain("n1", "asked to")
    found = describe_nodes(cluster.roster, frozenset([N1]))
    assert [(n.agent, n.pid, n.silent, n.draining) for n in found] == [
        ("n0", 12, False, ""),
        ("n1", 0, True, "asked to"),
    ]


def test_silence_counts_from_the_last_report_and_from_when_one_listens() -> None:
    record = JobRecord(term=1, slots=(Slot(worker=TWO, agent=N2, incarnation=Incarnation(1)),))
    cluster = Cluster(record=record)
    cluster.hear("n0")
    cluster.now = 2.0
    cluster.hear("n1")
    silent = [silent_nodes(cluster.roster, LEASE, now, 0.0) for now in (2.4, 2.5, 3.4, 3.5)]
    assert silent == [frozenset(), {N0, N2}, {N0, N2}, {N0, N1, N2}]
    for now, found in ((1.4, set()), (1.5, set()), (2.5, {N0, N2})):
        assert silent_nodes(cluster.roster, LEASE, now, 0.0) == found
    # A coordinator that has stood still has received no report for as long.
    assert silent_nodes(cluster.roster, LEASE, 11.4, 10.0) == set()
    assert silent_nodes(cluster.roster, LEASE, 11.5, 10.0) == {N0, N1}
    assert silent_nodes(cluster.roster, LEASE, 12.5, 10.0) == {N0, N1, N2}


# ---------------------------------------------------------------- who is started again

RESTART = RestartPolicy(
    strikes_free=1,
    backoff_s=0.75,
    backoff_max_s=3.0,
    probation_s=10.0,
    quarantine_s=4.0,
    quarantine_max_s=9.0,
    wrong_s=50.0,
    wrong_max_s=120.0,
)


def lose(cluster: Cluster, view: Any = None, *silent: int) -> list[str]:
    return cluster.change(*replace_lost(cluster.facts(view, *silent), RESTART))


def quarantined(cluster: Cluster, worker: WorkerId, *, wrong: bool = False) -> float:
    """Quarantine a worker; return for how long."""
    cluster.change(*quarantine(cluster.facts(), worker, RESTART, wrong=wrong))
    until = cluster.roster.slots[worker].respawn_at
    assert until is not None
    return until - cluster.now


def test_a_lost_worker_is_counted_once_and_waits_longer_each_time() -> None:
    cluster = Cluster(status(0))
    waited = []
    for before in range(1, 6):
        cluster.hear("n0", status(0, before, stage=Stage.LOST, detail="signal 9"))
        assert lose(cluster) == ["0: signal 9"]
        assert lose(cluster) == []
        slot = cluster.roster.slots[ZERO]
        if slot.incarnation == before:
            assert slot.respawn_at is not None
            waited.append(slot.respawn_at - cluster.now)
            cluster.now = slot.respawn_at - 0.1
            assert lose(cluster) == []
            assert cluster.roster.slots[ZERO] is slot
            cluster.now += 0.1
            assert lose(cluster) == []
        else:
            waited.append(0.0)
        assert cluster.roster.slots[ZERO].incarnation == before + 1
    assert waited == pytest.approx([0.0, 0.75, 1.5, 3.0, 3.0])


def test_a_loss_is_not_counted_again_by_a_coordinator_that_follows() -> None:
    cluster = Cluster(status(0, stage=Stage.LOST, detail="signal 9"))
    cluster.put(0, strikes=5)  # the coordinator waits for it then
    assert len(lose(cluster)) == 1
    cluster.put(0, respawn_at=None)  # the journal does not keep this
    assert lose(cluster) == []
    assert cluster.roster.slots[ZERO].strikes == 6


def test_a_clean_probation_of_a_member_ends_its_strikes() -> None:
    cluster = Cluster(member(0), member(1))
    for worker in (ZERO, ONE):
        cluster.put(worker, strikes=3, wrongs=2)
    view = view_of(0)  # only worker 0 is a member
    for cluster.now in (1.0, 10.9, 11.0):
        assert lose(cluster, view) == []
        assert cluster.roster.slots[ZERO].strikes == (0 if cluster.now == 11.0 else 3)
        assert cluster.roster.slots[ZERO].wrongs == (0 if cluster.now == 11.0 else 2)
    assert cluster.roster.slots[ONE].strikes == 3


def test_a_probation_begins_again_when_a_worker_was_no_member_in_between() -> None:
    cluster = Cluster(member(0), member(1))
    cluster.put(ZERO, strikes=3)
    for cluster.now, members in ((1.0, (0, 1)), (9.0, (1,)), (10.0, (0, 1)), (19.9, (0, 1))):
        lose(cluster, view_of(*members))
        assert cluster.roster.slots[ZERO].strikes == 3
    cluster.now = 20.0
    lose(cluster, view_of(0, 1))
    assert cluster.roster.slots[ZERO].strikes == 0


def test_a_member_is_lost_with_its_agent_and_with_its_node_once_that_is_given_up() -> None:
    cluster = Cluster(member(0), member(1), status(2))
    cluster.hear("n0")  # the agent has started again, and runs no worker
    cluster.hear("n2")
    view = view_of(0, 1)
    # the other workers are only starting
    assert lose(cluster, view) == ["0: the agent of node n0 ended, and the worker with it"]
    cluster.now = 1.0 + LEASE.abandon_s + LEASE.margin_s
    assert lose(cluster, view) == []
    assert lose(cluster, view, 1) == ["1: node n1 is lost"]


def test_a_counted_loss_does_not_double_the_first_wait_of_a_wrong_worker() -> None:
    """A worker that computes wrongly leaves on its own, and its loss may be reported first."""
    cluster = Cluster(member(0), status(1, stage=Stage.LOST, detail="signal 9"))
    assert lose(cluster) == ["1: signal 9"]
    assert cluster.roster.slots[ONE].strikes == 1
    waits = [quarantined(cluster, ONE, wrong=True) for _ in range(2)]
    assert waits == [RESTART.wrong_s, 2 * RESTART.wrong_s]


def test_a_worker_that_is_not_reached_or_is_wrong_is_left_out_for_longer_each_time() -> None:
    cluster = Cluster(member(0), member(1))
    waits = [quarantined(cluster, ZERO) for _ in range(3)]
    assert waits == [4.0, 8.0, 9.0]
    slot = cluster.roster.slots[ZERO]
    assert (slot.incarnation, slot.respawn_at, slot.strikes) == (4, 10.0, 3)
    found = quarantine_wrong(cluster.facts(), [ONE, WorkerId(9)], RESTART)
    assert cluster.change(*found) == ["worker 1 is left out for 50 s: it computes wrongly"]
    assert cluster.roster.slots[ONE].respawn_at == 51.0
    waits = [quarantined(cluster, ONE, wrong=True) for _ in range(2)]
    assert waits == [100.0, 120.0]


# ---------------------------------------------------------------- what is remembered


def test_the_newest_checkpoint_that_can_be_read_is_begun_from() -> None:
    durable = Durable()
    assert durable.step == 0
    durable.note([status(0, saved=20), status(1, saved=10), status(2)])
    assert (durable.step, durable.steps) == (20, (10, 20))
    durable.note([status(0, saved=10, unreadable=20)])
    assert durable.step == 10
    durable.note([status(1, saved=20)])  # the members that saved it do not know of it
    assert durable.step == 10
    durable.note([status(0, saved=s) for s in range(1000, 1000 + 2 * KNOWN_MAX)])
    assert durable.steps == tuple(range(1000 + KNOWN_MAX, 1000 + 2 * KNOWN_MAX))


def test_an_invalidated_step_does_not_count_until_it_is_saved_again() -> None:
    durable = Durable((10, 20, 30))
    durable.note([status(0, invalidations=(invalid(20, 4, 7),))])
    assert durable.steps == (10, 20)
    durable.note([status(1, saved=30, view=ViewNumber(4))])  # it has not received that news
    assert durable.step == 20
    durable.note([status(1, saved=30, view=ViewNumber(5))])
    assert durable.step == 30
    assert [durable.accused, durable.accused] == [[7], [7]]  # asking has no effect
    durable.judge()
    assert durable.accused == []
    assert Durable((), durable.invalidations).accused == []  # it was judged earlier


def test_only_workers_that_say_something_of_checkpoints_are_asked() -> None:
    said = [status(1, saved=3), status(2, unreadable=3), status(3, invalidations=(invalid(1, 1),))]
    assert list(speakers([status(0), *said])) == said


def test_each_event_is_told_once_though_statuses_repeat_them() -> None:
    one, two, three = (JobEvent(number=n, kind="k", text=str(n)) for n in (1, 2, 3))
    log = EventLog([Slot(worker=ONE, agent=N1, incarnation=Incarnation(1))])

    def news(worker: int, *events: JobEvent, incarnation: int = 1) -> list[str]:
        told = status(worker, incarnation, events=events)
        found = log.news([told])
        assert log.news([told]) == found, "asking changes nothing"
        if not log.is_told(told):
            log.mark(told)
        assert log.is_told(told)
        return [each.text for each in found]

    assert news(0, one, two) == ["1", "2"]
    assert news(2) == []
    assert news(0, one, two, three) == ["3"]
    assert news(0, two, three) == []
    assert news(1, one, two) == []  # another coordinator has sent that news
    assert news(1, two, three) == ["3"]
    assert news(1, one, incarnation=2) == ["1"]


def test_a_job_that_is_stopped_ends_after_the_checkpoint_or_in_time() -> None:
    stopping = Stopping("enough", 10, 50.0)
    found = [stopping.is_over(*each) for each in ((9, 49.9), (10, 0.0), (0, 50.0))]
    assert found == [False, True, True]


def test_equal_records_of_slots_are_one_object() -> None:
    roster = LiveRoster(None, 0.0)
    roster.apply(AddSlot(SlotState("a", Incarnation(1))))
    before = roster.slot_records()
    roster.apply(PutSlot(WorkerId(0), SlotState("a", Incarnation(1), respawn_at=3.0)))
    assert roster.slot_records() is before
    assert LiveRoster(JobRecord(term=1, slots=before), 0.0).slot_records() is before
