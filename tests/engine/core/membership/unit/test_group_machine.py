"""The machine of groups in a world of faults, judged by the truth; and planted bugs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from group_world import POLICY, GroupWorld, WrongError
from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.membership import group_decisions
from holdfast.engine.core.membership.agent import AgentMachine
from holdfast.engine.core.membership.changes import OrderNext, PutSlot
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
)
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.group import GroupMachine
from holdfast.engine.core.membership.group_decisions import GroupState, restore_slots
from holdfast.engine.core.membership.group_faults import Trials
from holdfast.engine.core.membership.job_changes import EndJob
from holdfast.engine.core.membership.liveness import ActivityMeter, ActivitySample
from holdfast.engine.core.membership.roster import Roster, SlotState
from holdfast.engine.core.policies import GroupPolicy
from holdfast.engine.core.types import AgentId, Incarnation, ProcessRole, Tick, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from roster_kit import Cluster, status

SEEDS = 40  # every planted bug is found in these
WORLDS = 240


@pytest.mark.parametrize("loses_journal", [False, True])
def test_a_few_worlds(loses_journal: bool) -> None:
    for seed in range(2):
        truth = GroupWorld(seed, loses_journal=loses_journal).run()
        assert truth.outcome == ""
        assert truth.groups


@pytest.mark.slow
@pytest.mark.parametrize("nodes_max", [1, 2])
@pytest.mark.parametrize("loses_journal", [False, True])
def test_many_worlds(loses_journal: bool, nodes_max: int) -> None:
    policy = dataclasses.replace(POLICY, nodes_max=nodes_max)
    for seed in range(WORLDS):
        assert GroupWorld(seed, policy, loses_journal=loses_journal).run().outcome == ""


# ---------------------------------------------------------------- planted bugs


def nobody_waits_for_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupState, "is_gone", lambda self, facts: True)


def a_silent_node_is_lost_at_once(patch: pytest.MonkeyPatch) -> None:
    def lost(self: GroupState, name: AgentId, facts: Facts) -> bool:
        return facts.now >= self.heard_at(name) + 1.5

    patch.setattr(GroupState, "is_node_lost", lost)


def a_node_alone_is_fenced_as_others_are(patch: pytest.MonkeyPatch) -> None:
    def lost(self: GroupState, name: AgentId, facts: Facts) -> bool:
        return facts.now >= self.heard_at(name) + self.policy.lease.fence_s

    patch.setattr(GroupState, "is_node_lost", lost)


def it_is_told_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    plain = GroupMachine._review

    def review(self: GroupMachine, *words: object) -> list[CoordinatorEffect]:
        effects = plain(self, *words)  # type: ignore[arg-type]
        return sorted(effects, key=lambda effect: isinstance(effect, Persist))

    patch.setattr(GroupMachine, "_review", review)


def numbers_begin_anew(patch: pytest.MonkeyPatch) -> None:
    plain = group_decisions.form_view

    def form(*words: object) -> object:
        view = plain(*words)  # type: ignore[arg-type]
        return dataclasses.replace(view, number=ViewNumber(1 + view.number % 3))

    patch.setattr(group_decisions, "form_view", form)
    patch.setattr(GroupMachine, "check", lambda self: None)


def one_that_is_done_is_enough(patch: pytest.MonkeyPatch) -> None:
    plain = group_decisions.decide_supervision

    def supervise(facts: Facts, group: GroupState) -> group_decisions.Plan:
        done = any(status.stage is Stage.EXITED for status in facts.roster.newest.values())
        return [EndJob("")] if done and group.is_running(facts.view) else plain(facts, group)

    patch.setattr(group_decisions, "decide_supervision", supervise)


def nobody_sees_that_it_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupState, "still_since", lambda self: float("inf"))


def who_died_with_its_agent_is_not_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "is_dead", lambda self, worker, incarnation: False)


def an_incarnation_is_ordered_twice(patch: pytest.MonkeyPatch) -> None:
    def order(self: SlotState, first: Incarnation) -> SlotState:
        number = Incarnation(1 + self.incarnation % 2)
        return dataclasses.replace(self, incarnation=number, respawn_at=None)

    patch.setattr(SlotState, "order_next", order)
    patch.setattr(AgentMachine, "check", lambda self: None)


def more_nodes_than_may(patch: pytest.MonkeyPatch) -> None:
    plain = GroupMachine.__init__

    def init(self: GroupMachine, policy: GroupPolicy, *words: object) -> None:
        plain(self, dataclasses.replace(policy, nodes_max=3), *words)  # type: ignore[arg-type]

    patch.setattr(GroupMachine, "__init__", init)


BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    nobody_waits_for_the_end,
    a_silent_node_is_lost_at_once,
    a_node_alone_is_fenced_as_others_are,
    it_is_told_before_it_is_durable,
    numbers_begin_anew,
    one_that_is_done_is_enough,
    nobody_sees_that_it_hangs,
    who_died_with_its_agent_is_not_missed,
    an_incarnation_is_ordered_twice,
    more_nodes_than_may,
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    alone = plant is a_node_alone_is_fenced_as_others_are
    policy = dataclasses.replace(POLICY, nodes_max=1) if alone else POLICY
    for seed in range(SEEDS):
        try:
            GroupWorld(seed, policy).run()
        except (WrongError, InvariantError, KeyError):
            return
    pytest.fail(f"{plant.__name__} was not found in {SEEDS} worlds")


# ---------------------------------------------------------------- one decision at a time


class Desk:
    """One node with two processes, one spare and a store, according to its reports."""

    def __init__(self, restarts_max: int = 1) -> None:
        policy = dataclasses.replace(POLICY, nodes_max=1, spares=1, restarts_max=restarts_max)
        self.machine = GroupMachine(policy, 1, None, 0.0)
        self.now = 0.0
        self.seq = 0
        self.wanted: dict[int, int] = {}
        self.effects: list[CoordinatorEffect] = []

    def report(self, stages: dict[int, Stage] | None = None, view: int = 0) -> None:
        self.seq += 1
        self.now += 0.1
        statuses = []
        for worker, incarnation in self.wanted.items():
            plain = WorkerStatus(worker=WorkerId(worker), incarnation=Incarnation(incarnation))
            stage = (stages or {}).get(worker, Stage.READY)
            statuses.append(dataclasses.replace(plain, stage=stage, view=ViewNumber(view)))
        report = AgentReport(
            agent=AgentId("n"),
            incarnation=Incarnation(1),
            seq=self.seq,
            slots=4,
            workers=tuple(statuses),
        )
        self.take(self.machine.handle(ReportArrived(report), self.now))

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.machine.handle(Tick(), self.now))

    def take(self, effects: list[CoordinatorEffect]) -> None:
        self.machine.check()
        self.effects += effects
        for effect in effects:
            if isinstance(effect, SendDirective):
                self.wanted = {w.worker: w.incarnation for w in effect.directive.wanted}

    def texts(self) -> list[str]:
        return [e.text for e in self.effects if isinstance(e, Announce)]


def test_a_group_is_formed_and_ends() -> None:
    desk = Desk()
    desk.report()
    desk.report()
    view = desk.machine.view
    assert view is not None
    assert (view.owners, view.leader, view.number) == ((1, 2), 0, 1)
    desk.report({1: Stage.EXITED, 2: Stage.EXITED}, view=view.number)
    assert desk.machine.outcome == ""
    desk.report(dict.fromkeys(desk.wanted, Stage.LOST))
    assert not [e for e in desk.effects if isinstance(e, Finish)], "the agent does not know yet"


def test_a_fault_ends_all_and_the_second_in_a_row_waits_and_the_third_is_too_much() -> None:
    desk = Desk(restarts_max=2)
    desk.report()
    desk.report()
    for number in (1, 2):
        view = desk.machine.view
        assert view is not None
        before = dict(desk.wanted)
        desk.report({view.owners[0]: Stage.FAILED}, view=view.number)
        assert {w for w in before if desk.wanted[w] > before[w]} == set(view.owners)
        desk.report()
        desk.pass_s(1.0)
        after = desk.machine.view
        assert after is not None
        assert (after.number, after.restarts) == (number + 1, number)
    view = desk.machine.view
    assert view is not None
    desk.report({view.owners[0]: Stage.FAILED}, view=view.number)
    outcome = desk.machine.outcome
    assert outcome is not None
    assert outcome.startswith("rank 0 on n failed: , after 2 restarts without progress")
    assert any("in 0.5 s (2 of at most 2 without progress)" in text for text in desk.texts())


def test_a_process_that_fails_before_it_has_a_rank_ends_the_job() -> None:
    desk = Desk()
    desk.report()
    desk.report()
    view = desk.machine.view
    assert view is not None
    (spare,) = set(desk.wanted) - {view.leader, *view.owners}
    desk.report({spare: Stage.FAILED}, view=view.number)
    assert desk.machine.outcome is None  # it was in a group that was lost with the journal
    desk.report({spare: Stage.FAILED})
    assert desk.machine.outcome == "no process can be started: "


def test_a_member_that_fails_is_a_fault_of_its_group() -> None:
    desk = Desk()
    desk.report()
    desk.report()
    desk.report({1: Stage.FAILED})
    assert desk.machine.outcome is None


def test_after_the_record_is_lost_every_node_has_one_store() -> None:
    cluster = Cluster(status(0), status(1))
    assert [s.role for s in cluster.roster.slots.values()] == [ProcessRole.WORKER] * 2
    plan = restore_slots(cluster.roster)
    cluster.change(*(change for change in plan if isinstance(change, PutSlot)))
    assert [s.role for s in cluster.roster.slots.values()] == [ProcessRole.STORE] * 2
    assert [change.worker for change in plan if isinstance(change, OrderNext)] == [0, 1]
    again = restore_slots(cluster.roster)
    assert not any(isinstance(change, PutSlot) for change in again)


def test_repeated_and_late_reports_change_nothing() -> None:
    desk = Desk()
    desk.report()
    desk.report()
    desk.seq -= 1
    assert desk.machine.view is not None
    desk.report({1: Stage.FAILED}, view=desk.machine.view.number)
    assert desk.machine.outcome is None
    assert len(desk.texts()) == 1


def test_a_group_that_does_nothing_hangs() -> None:
    desk = Desk()
    desk.report()
    desk.report()
    for _ in range(100):
        desk.report(view=1)
    assert "the group hangs" in desk.texts()[-1]


def test_a_coordinator_that_stood_still_takes_no_node_for_lost() -> None:
    """It has received no report for as long as that, from whatever node."""
    desk = Desk()
    desk.report()
    desk.report()
    desk.report(view=1)
    desk.pass_s(POLICY.lease.abandon_s + POLICY.lease.margin_s + 1.0)
    desk.report(view=1)
    assert desk.machine.view is not None
    assert (desk.machine.view.number, desk.machine.outcome) == (1, None)
    assert len(desk.texts()) == 1, "the group was formed, and that is all"


def test_progress_forgives_earlier_faults() -> None:
    policy = dataclasses.replace(POLICY, steady_s=10.0)
    trials = Trials(restarts=0, began_at=0.0, next_at=0.0, stepped_at=0.0)
    trials = trials.count_fault(1.0, policy).count_fault(2.0, policy)
    assert (trials.in_vain, trials.restarts, trials.next_at) == (2, 2, 2.5)
    trials = trials.begin(3.0).count_fault(13.0, policy)
    assert (trials.in_vain, trials.restarts, trials.next_at) == (1, 3, 13.0)
    trials = trials.begin(13.0).reach(7, 14.0).count_fault(14.5, policy)
    assert trials.in_vain == 1, "a step further than any before"
    trials = trials.begin(15.0).reach(7, 16.0).count_fault(100.0, policy)
    assert trials.in_vain == 2, "time does not count for a script that tells its steps"


@pytest.mark.parametrize(
    ("cpu_s", "printed", "step", "works"),
    [
        (0.0, 0, None, False),
        (0.5, 0, None, True),
        (0.001, 0, None, False),
        (0.0, 5, None, True),
        (0.9, 5, 3, False),
        (0.0, 0, 4, True),
    ],
)
def test_a_worker_is_at_work_if_its_step_or_else_its_output_or_cpu_time_advances(
    cpu_s: float, printed: int, step: int | None, works: bool
) -> None:
    first = ActivitySample(at=0.0, cpu_s=0.0, printed=0, step=None if step is None else 3)
    then = ActivitySample(at=1.0, cpu_s=cpu_s, printed=printed, step=step)
    assert ActivityMeter(first).observe(then) is works
