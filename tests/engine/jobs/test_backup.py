"""Backup workers: whose results count, the ledger's records of the other results, and real jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RUN_S, Start, finish
from holdfast.engine.commands.ledger_command import render
from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.step.backup import DropTally, Settlement, find_counted
from holdfast.engine.core.types import WorkerId
from holdfast.engine.records.ledger_audit import LedgerReport, verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import SamplePlan

Reference = Callable[[int], str]


# ---------------------------------------------------------------- the decision


def test_as_many_results_are_waited_for_as_there_are_workers_that_are_not_backup() -> None:
    policy = BackupPolicy(workers=2, results_min=4)
    assert [policy.needed_members(n) for n in range(1, 9)] == [1, 2, 3, 4, 4, 4, 5, 6]
    assert [BackupPolicy().needed_members(n) for n in range(1, 5)] == [1, 2, 3, 4]


@given(st.integers(1, 9), st.integers(0, 8), st.data())
def test_the_first_that_are_done_count(members: int, backup: int, data: st.DataObject) -> None:
    policy = BackupPolicy(workers=backup, results_min=data.draw(st.integers(1, 9)))
    done: dict[int, int] = {}
    for rank in data.draw(st.permutations(range(members))):
        assert find_counted(policy, members, done) == ()
        done[rank] = data.draw(st.integers(0, 1))
        counted = find_counted(policy, members, done)
        if counted:
            break
    assert counted == tuple(sorted(done))
    assert len(counted) >= max(members - backup, min(policy.results_min, members))
    assert any(done.values()) or len(counted) == members  # never a step without a sample


def test_the_story_tells_ever_more_rarely() -> None:
    tally = DropTally()
    told = [i for i in range(1, 20) if tally.note(6 + i, [WorkerId(i % 2)], 3)]
    assert told == [1, 2, 4, 8, 16]
    text = "57 samples were dropped since step 7, in 19 steps (of worker 0 in 9, of worker 1 in 10)"
    assert str(tally) == text


def test_all_members_settle_alike_and_only_rank_0_decides() -> None:
    first, second, third = (Settlement(BackupPolicy(workers=1), rank, 3) for rank in range(3))
    for each in (first, second, third):
        each.begin(7)
    assert (first.counted_ranks(7), second.record_own_done(7), second.record_own_done(7)) == (
        None,
        True,
        False,
    )
    assert first.record_done(1, 7, 4) == ()
    assert first.record_done(0, 7, 4) == (0, 1)
    assert first.record_done(2, 7, 4) == ()  # too late: a settled step stays settled
    assert (first.counted_ranks(7), first.drops(7)) == ((0, 1), False)
    for each in (second, third):
        each.record_settled(7, (0, 1))
    assert (second.drops(7), third.drops(7), third.record_own_done(7)) == (False, True, False)


def test_ranks_settled_for_a_later_step_are_kept_and_those_of_older_steps_forgotten() -> None:
    """A late worker learns whose results count in the next step before it begins that step."""
    member = Settlement(BackupPolicy(workers=1), 1, 3)
    member.begin(4)
    for step in (4, 5):
        member.record_settled(step, (0, 2))
    member.begin(5)
    assert (member.counted_ranks(4), member.counted_ranks(5), member.drops(5)) == (
        None,
        (0, 2),
        True,
    )
    first = Settlement(BackupPolicy(workers=1), 0, 3)
    first.begin(5)
    assert first.record_done(1, 4, 9) == first.record_done(2, 4, 9) == ()  # the step is over


# ---------------------------------------------------------------- real jobs

STEPS = 20
SCRIPT = ("--steps", str(STEPS), "--task-s", "0.05")
FAULTS = """
worker 2 steps 3-12 stall 0.3
worker 3 always slow 2 at random 0.3
worker 1 step 2 poison nan
"""


def options(tmp_path: Path, text: str, virtual: int = 5) -> tuple[str, ...]:
    faults = tmp_path / "faults.txt"
    faults.write_text(text)
    return "--virtual", str(virtual), "--backup", "1", "--faults", str(faults)


def digests(run: LocalRun) -> set[str]:
    """Return the digests of all workers, the leader's among them."""
    assert run.wait(RUN_S) == 0, run.log()
    assert run.leftovers() == []
    found = [line for line in run.out if re.fullmatch("[0-9a-f]{64}", line)]
    assert len(found) >= 3, run.log()
    return set(found)


def audited(run: LocalRun) -> LedgerReport:
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    assert report.steps == STEPS
    assert report.samples + report.dropped == _samples(5)
    return report


def _samples(vranks: int) -> int:
    plan = SamplePlan(length=203, batch_size=6, virtual_ranks=vranks, seed=0)
    return plan.samples_before(STEPS)


@pytest.mark.slow
def test_late_results_are_dropped_and_all_replicas_stay_alike(start: Start, tmp_path: Path) -> None:
    with start(*SCRIPT, "--all", nproc=5, options=options(tmp_path, FAULTS)) as run:
        assert len(digests(run)) == 1
    report = audited(run)
    assert report.dropped_in == STEPS  # the first four of five count
    assert "samples of late workers were dropped by choice" in render(report)
    assert re.search(r"of worker 2 in \d+", run.events("backup")[-1]["text"])
    assert run.events("lost") == run.events("wrong") == []
    begun = list((run.run_dir.path / "faults").glob("worker-2-step-*-stall-"))
    assert 0 < len(begun) < 10  # it does not begin steps that are complete without it


ONES = """
import torch, holdfast
from torch import nn
job = holdfast.join()
model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(37, 1)), batch_size=4)
for step in job.steps(data, until=14):
    weight = model.weight.item()
    for (x,) in step:
        step.backward(model(x).mean())
    assert abs(model.weight.grad.item() - 1) < 1e-6, model.weight.grad
    assert abs(step.loss - weight) < 1e-6, (step.loss, weight)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_gradient_and_loss_are_means_over_the_samples_that_count(tmp_path: Path) -> None:
    """Steps of a single sample wait for its worker."""
    script = tmp_path / "ones.py"
    script.write_text(ONES)
    with LocalRun(tmp_path / "run", ["--nproc", "3", "--backup", "1"], [str(script)]) as run:
        assert run.wait(RUN_S) == 0, run.log()
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    assert 0 < report.dropped <= 4 * 11
    assert report.dropped + report.samples == 3 * 37 + 2 * 12


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_that_always_comes_last_is_always_left_out(
    worker: int, start: Start, tmp_path: Path
) -> None:
    """The leader, one of them, settles whose results count; then other workers do its work."""
    faults = options(tmp_path, f"worker {worker} always slow 1.8")
    with start(*SCRIPT, "--all", nproc=5, options=faults) as run:
        assert len(digests(run)) == 1
    report = audited(run)
    assert report.dropped_in == STEPS
    text = run.events("backup")[-1]["text"]
    # On a busy machine another one may come last now and then.
    assert int(re.search(rf"of worker {worker} in (\d+)", text)[1]) > STEPS // 2


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_death_among_backup_workers(worker: int, start: Start, tmp_path: Path) -> None:
    """The dead worker may be a late one, or the worker that settles whose results count."""
    faults = f"{FAULTS}\nworker {worker} steps 3-8 kill\n"  # the steps that it begins
    with start(*SCRIPT, "--all", nproc=5, options=options(tmp_path, faults)) as run:
        assert len(digests(run)) == 1
    audited(run)
    assert {event["worker"] for event in run.events("lost")} == {worker}


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_that_stands_still_for_long_is_suspended_and_catches_up(
    worker: int, start: Start, tmp_path: Path
) -> None:
    """The step that it computes is committed without it."""
    faults = options(tmp_path, f"worker {worker} step 20 stall 4")
    script = ("--steps", "60", "--task-s", "0.05", "--all")
    with start(*script, nproc=5, options=faults) as run:
        assert len(digests(run)) == 1
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    texts = [event["text"] for event in run.events("view")]
    assert any(f"worker {worker} is late in step 21 and is suspended" in text for text in texts)
    assert any(f"worker {worker} joins" in text for text in texts)
    assert run.events("lost") == []


@pytest.mark.slow
@pytest.mark.parametrize("point", ["vote", "gather", "voted"])
def test_a_death_while_the_results_that_count_are_settled(
    point: str, start: Start, tmp_path: Path
) -> None:
    """Either all commit the step as it was settled, or it is settled again."""
    script = (*SCRIPT, "--all", "--fault", f"SIGKILL:{point}:5:0")
    with start(*script, nproc=5, options=options(tmp_path, "worker 2 step 5 stall 0.3")) as run:
        assert len(digests(run)) == 1
    audited(run)
    assert {event["worker"] for event in run.events("lost")} == {0}


@pytest.mark.slow
def test_several_tasks_each_and_data_workers(start: Start, tmp_path: Path) -> None:
    """A late worker does not begin its remaining tasks."""
    faults = options(tmp_path, FAULTS, virtual=6)
    with start(*SCRIPT, "--all", "--loaders", "1", nproc=3, options=faults) as run:
        assert len(digests(run)) == 1
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    assert report.samples + report.dropped == _samples(6)
    assert report.dropped


@pytest.mark.slow
def test_one_worker_that_is_left_is_waited_for(start: Start, tmp_path: Path) -> None:
    """There are fewer members than results wanted, so no worker can be spared."""
    kills = "\n".join(f"worker {w} always kill" for w in (1, 2))
    faults = options(tmp_path, kills, virtual=4)
    with start("--steps", "6", nproc=3, options=(*faults, "--losses-max", "90")) as run:
        assert run.wait(RUN_S) == 0, run.log()
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok


@pytest.mark.slow
def test_without_the_flag_no_bit_changes(start: Start, reference: Reference) -> None:
    with start("--steps", "12", nproc=3) as run:
        assert finish(run) == reference(12)
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert (report.ok, report.dropped) == (True, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--backup", "4"), r"--backup 4 must be from 0 to 3: a step of 4 workers needs"),
        (("--backup", "-1"), r"--backup -1 must be from 0 to 3"),
        (("--backup", "1", "--audit", "0.1"), r"--backup 1 and --audit 0.1 exclude each other"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple[str, ...], message: str, start: Start) -> None:
    with start(options=flags) as run:
        assert run.wait(RUN_S) != 0
    assert re.search(message, run.log())
