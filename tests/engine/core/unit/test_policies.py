"""The policies that follow from a job's settings, and the promised defaults.

A default ten times too great passes every test of the rule that reads it, so the numbers are here
once more, each with its meaning for a job.
"""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.engine.core import invalidations, policies
from holdfast.engine.core.directives import SIGTERM, AgentReport, Directive, WorkerDirective
from holdfast.engine.core.fleet.placements import FleetPolicy
from holdfast.engine.core.ground import standing
from holdfast.engine.core.job_problems import find_problem
from holdfast.engine.core.job_record import NO_SETBACKS, JobRecord
from holdfast.engine.core.job_spec import JobSpec, Nodes, Stragglers, Workers
from holdfast.engine.core.membership import (
    coordinator,
    durable,
    formation,
    reserve,
    review_schedule,
)
from holdfast.engine.core.membership.agent import AgentPolicy
from holdfast.engine.core.membership.lease import UNANSWERED_MAX
from holdfast.engine.core.membership.liveness import FreezePolicy
from holdfast.engine.core.policies import (
    BackupPolicy,
    CoordinatorPolicy,
    LeasePolicy,
    PacePolicy,
    ReplicationPolicy,
    RestartPolicy,
)
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.replica import intervals
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step import audit, newcomers, rulings, speculation
from holdfast.engine.core.step.balance import WINDOW_TIMES_MAX, BalancePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage, WorkerStatus
from holdfast.engine.state.memory import arena


def job(**sections: object) -> JobSpec:
    return dataclasses.replace(JobSpec(job="j", cwd="/", script="train.py"), **sections)


def test_the_coordinator_decides_by_what_the_job_says() -> None:
    spec = job(
        workers=Workers(nproc=4, virtual=16, min=3, losses_max=9, hang_s=77.0),
        nodes=Nodes(min=2, max=5, lease_s=5.0, abandon_s=60.0),
        stragglers=Stragglers(speculation_budget=0.25),
    )
    policy = spec.policy()
    assert (policy.virtual_ranks, policy.nodes_min, policy.nodes_max) == (16, 2, 5)
    assert (policy.workers_min, policy.hang_s, policy.restart.losses_max) == (3, 77.0, 9)
    assert policy.lease == LeasePolicy(lease_s=5.0, margin_s=1.0, suspect_s=2.5, abandon_s=60.0)
    assert (policy.speculation, spec.copies) == (0.125, 0.125)
    assert (spec.workers_at_start, spec.virtual_ranks, spec.nodes_max) == (8, 16, 5)
    plain = job(workers=Workers(nproc=4), nodes=Nodes(min=2))
    assert (plain.workers_at_start, plain.virtual_ranks, plain.nodes_max) == (8, 8, 2)


def test_as_many_results_are_needed_as_there_are_workers_but_for_those_that_may_be_late() -> None:
    spec = job(workers=Workers(nproc=4), nodes=Nodes(min=2), stragglers=Stragglers(backup=3))
    assert spec.backup() == BackupPolicy(workers=3, results_min=5)
    assert spec.pace() == PacePolicy(*spec.checkpoints.between_s)


@pytest.mark.parametrize("field", ["job", "cwd", "script", "args"])
def test_a_text_that_no_process_can_be_given_is_named(field: str) -> None:
    value = ("fine", "a\0b") if field == "args" else "a\0b"
    assert find_problem(job(**{field: value})).startswith(f"{field} 'a\\x00b'")
    assert find_problem(job()) == ""


def test_the_defaults_for_waits_are_pinned() -> None:
    lease = LeasePolicy()
    assert (lease.lease_s, lease.margin_s, lease.suspect_s) == (2.0, 0.5, 1.5)
    assert (lease.abandon_s, lease.fence_s) == (300.0, 2.5)
    freeze = FreezePolicy()
    assert freeze.stopped_samples * freeze.sample_s == 1.0
    assert freeze.silent_samples * freeze.sample_s == 2.5
    assert AgentPolicy().heartbeat_s == 0.5
    policy = CoordinatorPolicy(virtual_ranks=1)
    assert (policy.settle_s, policy.patience_s, policy.hang_s) == (120.0, 5.0, 1800.0)
    assert policy.grace_s == 25.0  # schedulers give 30 s between signal and kill
    assert (policy.nodes_min, policy.workers_min, policy.retreats_max) == (1, 1, 3)
    assert policy.nodes_max >= 10_000
    assert policy.speculation == 0.0
    assert (PacePolicy().least_s, PacePolicy().most_s) == (10.0, 1800.0)
    assert StepPolicy().restore_s == 300.0


def test_the_defaults_for_restarting_workers_are_pinned() -> None:
    restart = RestartPolicy()
    assert (restart.losses_max, restart.strikes_free, restart.probation_s) == (30, 2, 60.0)
    assert (restart.backoff_s, restart.backoff_max_s) == (0.5, 30.0)
    assert (restart.quarantine_s, restart.quarantine_max_s) == (5.0, 300.0)
    assert (restart.wrong_s, restart.wrong_max_s) == (60.0, 86_400.0)


def test_the_defaults_for_a_step_are_pinned() -> None:
    assert Patience() == Patience(steps=8, times=1.0, least_s=0.5, copies=0.0)
    assert BalancePolicy() == BalancePolicy(warm_up=2, window=6, gain=8, calm=200, retry=50)
    assert BackupPolicy() == BackupPolicy(workers=0, results_min=1)
    assert SavePolicy() == SavePolicy(enabled=False, every=0, pace=PacePolicy(), compared=False)
    policy = StepPolicy()
    assert (policy.seed, policy.audit, policy.audit_tolerance) == (0, 0.0, 0.0)
    assert (policy.cycle, policy.keeps) == (0, False)
    assert (policy.script_cycle, policy.processor) == (0, 0)
    assert policy.replication == ReplicationPolicy(redundancy=Redundancy(), every=0)


def test_the_defaults_for_a_fleet_are_pinned() -> None:
    fleet = FleetPolicy(prefix="", nodes=1, nodes_max=1)
    assert (fleet.disruptions_max, fleet.drain_lead_s, fleet.again_s) == (1, 60.0, 5.0)
    assert (fleet.answer_s, fleet.retry_s, fleet.retry_max_s) == (60.0, 2.0, 30.0)
    assert (fleet.picky_tries, fleet.picky_s, fleet.unseen_s) == (3, 45.0, 60.0)
    assert (fleet.join_s, fleet.lost_s) == (300.0, 5.0)
    assert (fleet.farewell_s, fleet.disowned_s, fleet.avoid_s) == (10.0, 30.0, 60.0)


ENDLESS = ("acting_until", "leaves_in_s")  # both are endless while no status limits them


# Values without a meaning, although they are not false.
NOTHING = (Stage.BOOTING, ReplicaStage.ABSENT, Phase.SCRIPT, SIGTERM, NO_SETBACKS)


def test_a_record_that_says_nothing_wants_nothing() -> None:
    status = WorkerStatus(worker=0, incarnation=1)
    for record in (
        WorkerDirective(),
        Directive(term=1, seq=1, agent="a", agent_incarnation=1),
        AgentReport(agent="a", incarnation=1, seq=1, slots=1),
        JobRecord(term=1),
        status,
    ):
        for field in dataclasses.fields(record):
            if field.default is not dataclasses.MISSING and field.name not in ENDLESS:
                value = getattr(record, field.name)
                assert not value or value in NOTHING, field.name
    assert WorkerDirective().acting_until == float("inf")
    view = View(number=1, members=(), owners=(), resume_step=0, leader=0)
    assert (view.joiners, view.suspended, view.catching_up, view.invalidations) == ((),) * 4


def test_the_bounds_on_everything_that_is_kept_are_pinned() -> None:
    assert formation.STEPS_MISSED_MAX == 64  # steps that a worker may miss and still catch up
    # It is longer than a first quarantine and shorter than the later ones.
    assert formation.QUARANTINED_S == 10.0
    assert coordinator.SKIPPED == 1000  # numbers, after the loss of the journal
    assert (durable.KNOWN_MAX, invalidations.INVALIDATIONS_MAX) == (128, 16)
    assert (standing.JOB_EVENTS_MAX, UNANSWERED_MAX) == (8, 1024)
    assert review_schedule.REVIEW_S * 10_000 == 0.5  # between two reviews of 10,000 workers
    assert (audit.ATTEMPTS_MAX, rulings.MISTAKES_MAX, rulings.CALM_STEPS) == (3, 1, 64)
    assert (speculation.STEPS_TIMED, speculation.SPREADS) == (16, 6.0)
    assert WINDOW_TIMES_MAX == 8
    assert (newcomers.REFUSED_MAX, reserve.REPLACED_MAX) == (1, 8)
    assert (arena.PARTS_MAX, arena.COUNT_MAX) == (100_000, 1 << 53)
    assert intervals.STEPS_KEPT == 50
    # 419 unexpected interruptions of 16,384 GPUs in 54 days: of one worker, in five years.
    assert 5.0 < policies.WORKER_MTBF_S / (365 * 86_400) < 6.0
