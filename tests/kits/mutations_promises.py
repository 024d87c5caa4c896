"""Planted bugs in the promises to people, and in workers' reports on their scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.membership import (
    admission,
    decision_loop,
    next_view,
    node_process,
    view_making,
)
from holdfast.engine.core.membership import coordinator as co
from holdfast.engine.core.membership import view_end as ve
from holdfast.engine.core.membership.agent import (
    AgentEffect,
    AgentEvent,
    AgentMachine,
    JobOver,
    ProcessExited,
)
from holdfast.engine.core.membership.changes import AddSlot, Change
from holdfast.engine.core.membership.departure import Departure, OwnJob
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.event_log import EventChain
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.job_end import Stopping
from holdfast.engine.core.membership.liveness import FreezeDetector, ProcessSample
from holdfast.engine.core.membership.machine_losses import MachineLosses
from holdfast.engine.core.membership.node_process import EndVerdict, judge_end
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.replica.retention import Retention, Saved
from holdfast.engine.core.replica.saves import Saves
from holdfast.engine.core.step.late_watch import LateWatch
from holdfast.engine.core.step.verdicts import Decided
from holdfast.engine.core.types import AgentId, Incarnation, Tick, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import Phase
from holdfast.lab.sim import stored
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation

# ---------------------------------------------------------------- the event log


@mutation
def the_first_commit_after_a_fault_is_not_told(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(EventChain, "take_in", lambda self, report, now: None)
    return Machines()


@mutation
def a_view_names_no_fault_as_its_cause(patch: pytest.MonkeyPatch) -> Machines:
    plain = EventChain._enter

    def enter(self: EventChain, view: View, name: str) -> tuple[str, ...]:
        plain(self, view, name)
        return ()

    patch.setattr(EventChain, "_enter", enter)
    return Machines()


# ---------------------------------------------------------------- checkpoints


@mutation
def the_checkpoint_with_the_latest_time_is_the_newest(patch: pytest.MonkeyPatch) -> Machines:
    def choose(saved: Sequence[Saved], policy: Retention) -> tuple[int, ...]:
        ordered = sorted(saved, key=lambda each: -each.age_s)
        return tuple(sorted(each.step for each in ordered[-policy.last :]))

    patch.setattr(stored, "choose_kept", choose)
    return Machines()


@mutation
def the_checkpoint_of_the_highest_step_is_the_newest(patch: pytest.MonkeyPatch) -> Machines:
    def choose(saved: Sequence[Saved], policy: Retention) -> tuple[int, ...]:
        return tuple(sorted(each.step for each in saved)[-policy.last :])

    patch.setattr(stored, "choose_kept", choose)
    return Machines()


# ---------------------------------------------------------------- ends


@mutation
def a_full_disk_is_the_scripts_fault(patch: pytest.MonkeyPatch) -> Machines:
    def judge(code: int, told: str, *rest: object) -> EndVerdict:
        return judge_end(code, told, None, True, "") if code > 0 else judge_end(code, told, *rest)

    patch.setattr(node_process, "judge_end", judge)
    return Machines()


@mutation
def one_full_disk_ends_the_job(patch: pytest.MonkeyPatch) -> Machines:
    plain = MachineLosses.reason_to_end

    def reason(self: MachineLosses, step: int, _: object) -> str:
        return plain(self, step, lambda: {c.worker: c.loss.node for c in self._counted})

    patch.setattr(MachineLosses, "reason_to_end", reason)
    return Machines()


@mutation
def whoever_ends_with_status_0_has_come_to_its_end(patch: pytest.MonkeyPatch) -> Machines:
    class Trusting(AgentMachine):
        def _handle_exit(self, event: ProcessExited) -> bool:
            return super()._handle_exit(dataclasses.replace(event, reported=True))

    return Machines(agent=Trusting)


@mutation
def a_stop_waits_although_its_checkpoint_is_durable(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Stopping, "is_over", lambda self, durable, now: now >= self.until)
    return Machines()


@mutation
def nobody_makes_the_last_checkpoint_of_a_stop(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Saves, "want", lambda self, order: None)
    return Machines()


# ---------------------------------------------------------------- jobs


@mutation
def whoever_is_at_the_address_is_obeyed(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(OwnJob, "meet", lambda self, job: True)
    return Machines()


@mutation
def a_node_of_another_job_keeps_its_workers(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(AgentMachine, "_end_all", lambda self, reason: [])
    return Machines()


@mutation
def the_word_that_the_job_is_over_is_not_believed(patch: pytest.MonkeyPatch) -> Machines:
    class Deaf(AgentMachine):
        def handle(self, event: AgentEvent, now: float) -> list[AgentEffect]:
            return super().handle(Tick() if isinstance(event, JobOver) else event, now)

    return Machines(agent=Deaf)


# ---------------------------------------------------------------- nodes


@mutation
def only_nodes_that_were_heard_count(patch: pytest.MonkeyPatch) -> Machines:
    heard = property(lambda self: [name for name in self.nodes if self.workers_of(name)])
    patch.setattr(Roster, "nodes_with_places", heard)
    return Machines()


@mutation
def a_node_is_given_a_slot_too_many(patch: pytest.MonkeyPatch) -> Machines:
    plain = admission.admit

    def admit(facts: Facts, policy: CoordinatorPolicy) -> tuple[tuple[AgentId, ...], list[Change]]:
        waiting, plan = plain(facts, policy)
        begun = {c.slot.agent: c for c in plan if isinstance(c, AddSlot)}
        return waiting, [*plan, *begun.values()]

    class Crowded(AgentMachine):
        def _reconcile(self, now: float) -> list[AgentEffect]:
            offered = self._plain
            self._plain = dataclasses.replace(offered, slots=1 << 20)
            effects = super()._reconcile(now)
            self._plain = offered
            return effects

    patch.setattr(admission, "admit", admit)
    return Machines(agent=Crowded)


@mutation
def the_job_starts_on_fewer_nodes(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(co.formation, "present_nodes", lambda facts: 1 << 20)
    return Machines()


@mutation
def a_drained_node_is_used_on(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(admission, "drain", lambda facts: ("", []))
    return Machines()


@mutation
def what_was_not_reported_does_not_run(patch: pytest.MonkeyPatch) -> Machines:
    def over(roster: Roster, now: float, fence_s: float) -> bool:
        return not any(s.stage.alive for n in roster.nodes.values() for s in n.statuses.values())

    patch.setattr(decision_loop, "have_all_ended", over)
    return Machines()


@mutation
def too_few_workers_go_on(patch: pytest.MonkeyPatch) -> Machines:
    plain = ve.choose_change

    def why_change(facts: Facts, workers_min: int, step: int) -> tuple[str, str] | None:
        return plain(facts, 1, step)

    patch.setattr(ve, "choose_change", why_change)
    return Machines()


# ---------------------------------------------------------------- leaders


@mutation
def each_view_has_another_leader(patch: pytest.MonkeyPatch) -> Machines:
    plain = view_making.make_view

    def make_view(proposal: Any, number: Any, old: View | None, roster: Roster, procs: int) -> View:
        return plain(proposal, number, None, roster)

    patch.setattr(next_view, "make_view", make_view)
    return Machines()


@mutation
def who_has_promised_still_leads(patch: pytest.MonkeyPatch) -> Machines:
    def leads(self: Standing, now: float) -> bool:
        mine = self.view is not None and self.view.leader == self.me
        return mine and now < self.acting_until

    patch.setattr(Standing, "leads", leads)
    return Machines()


@mutation
def nobody_waits_for_the_leader_to_leave(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Standing, "leads_now", property(lambda self: True))
    return Machines()


# ---------------------------------------------------------------- what is kept


@mutation
def the_oldest_checkpoint_is_begun_from(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Durable, "step", property(lambda self: self.steps[0] if self.steps else 0))
    return Machines()


@mutation
def nobody_waits_for_a_silent_holder_of_the_state(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Facts, "can_return", lambda self, member: False)
    return Machines()


@mutation
def a_node_acts_beyond_the_end_that_it_has_announced(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Departure, "ends_at", property(lambda self: float("inf")))
    return Machines()


@mutation
def a_paused_process_counts_as_frozen(patch: pytest.MonkeyPatch) -> Machines:
    class Observing(AgentMachine):
        def _handle_sample(
            self, worker: WorkerId, incarnation: Incarnation, sample: ProcessSample
        ) -> list[AgentEffect]:
            process = self._find_current(worker, incarnation)
            if process is None or not process.running:
                return []
            reason = process.detector.observe(sample)
            return self._kill(worker, reason) if reason is not None else []

    return Machines(agent=Observing)


@mutation
def whoever_is_silent_counts_as_frozen(patch: pytest.MonkeyPatch) -> Machines:
    plain = FreezeDetector.observe

    def observe(self: FreezeDetector, sample: ProcessSample) -> str | None:
        return plain(self, ProcessSample(state=sample.state, progress=0))

    patch.setattr(FreezeDetector, "observe", observe)
    return Machines()


# ---------------------------------------------------------------- scripts


@mutation
def a_worker_says_that_it_waits_when_it_computes(patch: pytest.MonkeyPatch) -> Machines:
    plain = LateWatch._report_idle
    patch.setattr(LateWatch, "_report_idle", lambda self, idle: plain(self, True))
    return Machines()


@mutation
def a_worker_never_says_that_it_waits(patch: pytest.MonkeyPatch) -> Machines:
    plain = LateWatch._report_idle
    patch.setattr(LateWatch, "_report_idle", lambda self, idle: plain(self, False))
    return Machines()


@mutation
def a_gradient_is_said_to_be_there_too_early(patch: pytest.MonkeyPatch) -> Machines:
    plain = LateWatch._report_idle

    def report_idle(self: LateWatch, idle: bool) -> None:
        if self._standing.status.has_state:
            self._standing.change(reduced=idle)
        plain(self, idle)

    patch.setattr(LateWatch, "_report_idle", report_idle)
    return Machines()


@mutation
def a_worker_in_its_own_code_is_taken_to_rest(patch: pytest.MonkeyPatch) -> Machines:
    class Resting(WorkerMachine):
        def _commit_step(self, vote: Decided) -> None:
            super()._commit_step(vote)
            if self._standing.status.committed > vote.step:
                self._standing.change(phase=Phase.BOUNDARY)

    return Machines(worker=Resting)


# ---------------------------------------------------------------- pace


@mutation
def nobody_is_asked_to_join(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(ve, "choose_change", lambda facts, workers_min, step: None)
    return Machines()


@mutation
def views_follow_each_other_for_no_reason(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(ve, "choose_change", lambda facts, workers_min, step: ("join", "again"))
    return Machines()
