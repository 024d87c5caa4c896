"""Simulates the protocol: seeds are clean, repeat exactly and report their faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from holdfast.lab import sim_command as cli
from holdfast.lab.sim.run_options import RACK_KINDS
from holdfast.lab.sim.swarm import Summary, run_many, run_seed
from mutation_kit import COMBINED, GOES_ON, JOINS, SHARDS, SPREAD, STOPS
from places import ROOT

SRC = ROOT / "src"

# Seeds (small, seed) that once failed, each with the mistake that was in the core.
REGRESSIONS = (
    (True, 17),  # a survivor that was to be replaced as hung entered a view as its next incarnation
    (True, 43),  # a lost worker in its back-off was started again as the same incarnation
    (True, 104),  # a vote lost before a planned stop left its reader waiting until hang_s
    (
        True,
        159,
    ),  # a donor broke while held; the joiner never heard of it and nobody stopped the view
    (True, 219),  # the leader ended; a member with the gradient but not all votes waited for ever
    (False, 29),  # a node lost for good at the end of the job counted as alive for ever
    (False, 431),  # a node without a lease started a worker that nobody could fence or end
    (False, 78),  # members lost at the end of the job were started again as the same incarnation
    (False, 224),  # a coordinator that had been frozen took the silence for a job that hangs
    (False, 564),  # one that had to stop while catching up was waited for; others were replaced
    (
        True,
        6,
    ),  # a restarted coordinator gave slots to a spare: it counted only workers it had heard
    (False, 79),  # a member of a node that was given up before it was ever heard counted as alive
    (False, 226),  # a node that was dismissed and taken back ran more processes than it has slots
    (False, 305),  # the first worker to rest cut off the last votes, so that no joiner was let in
    (True, 615),  # a step that only one member had committed, which was then left out, was redone
    (False, 1227),  # a worker's word on a checkpoint was forgotten when its agent began again
    (False, 3911),  # a worker that hosted nothing in a step counted as compared in it
    (False, 377),  # a coordinator without its journal began a view while unheard members acted
    (False, 1442),  # a step was computed again although a node's memory held it
    (False, 1596),  # the same, in a later view
    (False, 2170),  # the same, with several nodes
    (True, 256),  # a fault that came before the commit of the view was reported had no incident
    (False, 413),  # workers of a node that was given up counted as spared by their machine's error
)


# Seeds that failed because a checker was wrong.
SOUND = (
    (True, 393),  # two faults in one step: each worker computed other numbers each time
    (False, 186),  # a frozen agent looks at no process
    (True, 747),  # a worker that was alone had accepted sums that are not finite
    (False, 1124),  # a restarted coordinator need not wait for a node that was given up before
    (False, 3066),  # a node whose report came twice counted as heard again
    (False, 2099),  # slots of an ending job name processes that may still run
    (False, 3622),  # a frozen agent cannot end in time after it met another job
    (True, 1592),  # shards that are seconds late make their worker look hung
    (True, 459),  # a sound job on a slow network had a fixed time for its last checkpoint
    (True, 556),  # a worker that had committed died, and the one left alone computed wrongly
    (False, 92),  # servers have no rows of older steps, so the nodes' memory of them is of no use
    (False, 65),  # nodes' memory gave back a step that no worker had committed
    (False, 5008),  # lost rows of a table took a job back that had an error which was not seen yet
)


@pytest.mark.slow_with("False-1596", "False-305", "False-3911")
@pytest.mark.parametrize(("small", "seed"), [*REGRESSIONS, *SOUND])
def test_seed_that_once_failed(small: bool, seed: int) -> None:
    result = run_seed(seed, small=small)
    assert not result.failure, f"{result.failure}\n{result.replay}"


def test_a_job_whose_workers_die_before_they_report_their_steps_goes_on() -> None:
    """The nodes' memory shows that steps were committed between the losses."""
    result = run_seed(303, small=True, tuned=SPREAD)
    assert not result.failure, result.failure


def test_a_planned_leave_takes_no_step_along() -> None:
    """The only worker is spread over three nodes, which leave while their memory bears no loss."""
    leaves = SPREAD | {"faults": ("leave",), "pieces": (1, 0)}
    for seed in (0, 8, 9):
        result = run_seed(seed, small=True, tuned=GOES_ON | leaves)
        assert not result.failure, result.failure
        assert result.faults["leave"] > 1


def test_a_worker_that_was_paused_goes_on_by_the_renewed_right_to_act() -> None:
    """The lease is short for this network; a worker that loses it restarts all workers."""
    result = run_seed(130, small=True, tuned=SHARDS)
    assert not result.failure, result.failure
    assert result.views < 10


def test_reports_that_are_slow_at_times_do_not_restart_the_workers_again_and_again() -> None:
    """Each false suspicion costs such workers a restart, since each holds a share of the state."""
    result = run_seed(26, tuned=SHARDS)
    assert not result.failure, result.failure
    assert result.views < 8


@pytest.mark.slow_with(
    "agents on lossy links", "full disks and lost workers", "partitions and coordinators"
)
@pytest.mark.parametrize("swarm", COMBINED)
def test_faults_that_meet_are_survived(swarm: str) -> None:
    results = [run_seed(seed, small=True, tuned=COMBINED[swarm]) for seed in range(6)]
    for result in results:
        assert not result.failure, f"{result.failure}\n{result.replay}"
    struck = {kind for result in results for kind in result.faults}
    assert struck >= set(COMBINED[swarm]["faults"]) - {"lossy"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("swarm", COMBINED)
def test_many_faults_that_meet_are_survived(swarm: str) -> None:
    found = [run_seed(seed, small=True, tuned=COMBINED[swarm]).failure for seed in range(200)]
    assert not any(found)


@pytest.mark.slow
def test_nodes_that_an_earlier_job_has_left_at_the_address_end_without_a_part_in_this_one() -> None:
    for seed in range(20):
        told: list[str] = []
        result = run_seed(seed, small=True, listener=told.append, tuned={"left_behind_s": 4.0})
        assert result.failure == "", result.replay
        met = [line for line in told if "CoordinatorReached(job=job)" in line]
        ended = [line for line in told if "and job job is at its address now" in line]
        assert met
        assert len(ended) == len(met)


@pytest.mark.parametrize("seed", [2, 41, 65])
def test_workers_of_several_processes_train_where_others_would_be_fed(seed: int) -> None:
    """The simulator announced such workers for feeding, which the product never does."""
    result = run_seed(seed, small=True, tuned=SPREAD | {"feeds": True})
    assert not result.failure, f"{result.failure}\n{result.replay}"
    assert result.commits > 0


PARTS = {
    "parts_at": 4,
    "shard_optimizer": False,
    "loops": (9,),
    "agents": 2,
    "slots": 1,
    "agents_late": 0,
    "vranks": 2,
    "nodes_min": 2,
    "nodes_max": 2,
    "workers_min": 1,
    "faults": (),
}
ON_ALL = {"fails_by_machine": True, "faults": ()}


def test_one_machine_with_errors_of_its_own_never_ends_the_job() -> None:
    tuned = JOINS | {"faults": ("machine_error",), "agents_late": 0}
    for seed in range(4):
        result = run_seed(seed, small=True, tuned=GOES_ON | tuned)
        assert not result.failure, f"{result.failure}\n{result.replay}"
        assert result.outcome == ""
        assert result.faults["machine_error"] > 2


def test_jobs_end_as_they_should() -> None:
    outcomes: dict[str, dict[str, object]] = {
        "": {},
        "its operator has stopped it": {"stop_s": 3.0},
        "workers were lost at step": {"losses_max": 2, "loops": (100,), "task_s": 1.0},
        "failed: its script raises": {"fails_in": 3, "fails_by_machine": False},
        "(a disk is full on every worker): its script raises": {"fails_in": 3} | ON_ALL,
        "the script of worker 0 has left its loop after step 4": PARTS,
        "of worker 0 has left its loop after step 4": PARTS | {"shard_optimizer": True},
    }
    for outcome, tuned in outcomes.items():
        for seed in (0, 8, 10):  # processes still ran here when the job was said to be over
            result = run_seed(seed, small=True, tuned=STOPS | GOES_ON | tuned)
            assert not result.failure, f"{result.failure}\n{result.replay}"
            assert outcome in (result.outcome or ""), (seed, outcome, result.outcome)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("pieces", [(0, 0), (1, 1)])
def test_a_leader_that_ends_alone_is_named_although_coordinators_come_and_go(
    shares: bool, pieces: tuple[int, int]
) -> None:
    faults = ("coordinator_crash", "coordinator_crash_inside", "coordinator_freeze")
    tuned = STOPS | GOES_ON | PARTS | {"pieces": pieces, "shard_optimizer": shares}
    tuned |= {"save_every": 2, "faults": faults, "faults_end_s": 20.0, "fault_every_s": 0.7}
    for seed in range(10):
        result = run_seed(seed, small=True, tuned=tuned)
        assert not result.failure, f"{result.failure}\nseed {seed}"
        assert "has left its loop" in (result.outcome or ""), seed


@pytest.mark.parametrize("small", [pytest.param(True, marks=pytest.mark.slow), False])
def test_swarm_is_clean_and_not_vacuous(small: bool) -> None:
    summary = Summary()
    for seed in range(40):
        result = run_seed(seed, small=small)
        assert not result.failure, f"{result.failure}\n{result.replay}\n" + "\n".join(result.story)
        summary.add(result)
    assert summary.views > 80
    assert summary.commits > 500
    assert len(summary.faults) >= 13  # kinds; the rarest may be missing from these few seeds


@pytest.mark.slow
def test_a_job_of_a_hundred_nodes_loses_racks() -> None:
    summary = Summary()
    for seed in range(2):
        result = run_seed(seed, nodes=100, tuned={"faults": (*RACK_KINDS, "coordinator_crash")})
        assert not result.failure, f"{result.failure}\n{result.replay}"
        summary.add(result)
    assert summary.views > 2
    assert sum(n for kind, n in summary.faults.items() if kind.startswith("rack")) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_of_ten_thousand_nodes() -> None:
    result = run_seed(1, nodes=10_000)
    assert not result.failure, f"{result.failure}\n{result.replay}"
    assert result.views > 1
    assert result.faults["rack_partition"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("small", [True, False])
def test_a_thousand_seeds_are_clean(small: bool) -> None:
    failed = [r.replay for r in run_many(range(1000), small=small) if r.failure]
    assert failed == []


@pytest.mark.slow
def test_same_seed_same_trace_under_any_hash_seed() -> None:
    code = (
        "from holdfast.lab.sim.swarm import run_seed\n"
        "print([run_seed(s, small=s % 2 == 0).digest for s in range(12)])"
    )
    digests = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SRC)}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(run.stdout)
    assert digests[0] == digests[1]
    assert len(set(json.loads(digests[0]))) == 12


@pytest.mark.slow
def test_failure_tells_its_story_and_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "holdfast.engine.core.membership.formation.resume_step", lambda s, lost: (0, "planted")
    )
    assert cli.main(["--seeds", "0:20", "--small"]) == 1
    output = capsys.readouterr().out
    failed = next(line for line in output.splitlines() if "FAILED at" in line)
    seed = int(failed.split()[1])
    assert f"holdfast sim --seed {seed} --small --trace" in output
    assert cli.main(["--seed", str(seed), "--small"]) == 1
    printed = capsys.readouterr().out
    assert "coordinator." in printed
    assert failed in printed


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--seeds", "0:3", "--small", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["seeds"] == 3
    assert record["failed"] == []
    assert record["events"] > 0
    assert cli.main(["--seed", "1", "--small", "--trace"]) == 0
    assert "worker 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--seeds", "5"], ["--seeds", "9:3"], ["--seed", "x"], []])
def test_bad_arguments_give_one_clear_line(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("holdfast sim: error:")
    assert not any("Traceback" in line for line in error)
