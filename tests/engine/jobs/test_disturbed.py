"""Party scripts are read without surprises; jobs that meet slow workers end with the same bits."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import Start, finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.faults.disturbed import Disturber, flip_bit
from holdfast.engine.faults.fault_script import ACTIONS, Disturbance, parse
from holdfast.engine.records.diagnoses import Party
from holdfast.engine.records.incidents import list_incidents
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import SamplePlan

Reference = Callable[[int], str]
STEPS = 20


def test_a_script_of_faults_names_workers_steps_and_actions() -> None:
    text = """
    # a comment
    worker 3      steps 10-200   slow 2.0      # at the end of a line, too
    worker 1,2    from step 50   slow 5 at random 0.25
    any worker    always         stall 2.5
    worker 0      step 7         flip parameter
    """
    assert parse(text, "x") == (
        Disturbance(workers=(3,), first=10, last=200, action="slow", number=2.0),
        Disturbance(workers=(1, 2), first=50, last=1 << 60, action="slow", number=5.0, chance=0.25),
        Disturbance(workers=(), first=0, last=1 << 60, action="stall", number=2.5),
        Disturbance(workers=(0,), first=7, last=7, action="flip", target="parameter"),
    )


def test_every_action_that_is_promised_can_be_written() -> None:
    for form in ACTIONS:
        for choice in form.split(" ")[-1].split("|"):
            words = [*form.split(" ")[:-1], choice]
            line = " ".join(w if w.islower() else "0.5" for w in words)
            assert len(parse(f"worker 1 step 2 {line}", "x")) == 1, line


@pytest.mark.parametrize(
    "line",
    [
        "worker x step 1 kill",
        "worker 1 kill",
        "worker 1 step 2 explode",
        "slow 2",
        "worker 1 step -1 kill",
    ],
)
def test_a_line_that_makes_no_sense_is_named(line: str) -> None:
    with pytest.raises(UserError, match=r"faults.txt, line 2: .* is not `worker N step N ACTION`"):
        parse(f"worker 1 step 2 kill\n{line}\n", "faults.txt")


def test_a_fault_that_strikes_once_strikes_once_in_a_step() -> None:
    faults = parse("worker 1 steps 3-4 flip gradient", "x")
    for worker, struck in ((1, [3, 4]), (2, [])):
        disturber, found = Disturber(worker, faults), []
        for step in range(6):
            disturber.boundary(step, {})
            for vrank in range(3):
                flat = torch.zeros(100)
                disturber.handle_gradient(vrank, flat)
                if flat.any():
                    found.append(step)
        assert found == struck


def test_a_flipped_bit_is_one_bit_and_the_same_every_time() -> None:
    tensors = [torch.zeros(5), torch.zeros(300, dtype=torch.bfloat16)]
    flip_bit(random.Random(3), tensors)
    changed = [b for t in tensors for b in t.view(torch.uint8).tolist() if b]
    assert changed[0] in [1 << i for i in range(8)]
    assert len(changed) == 1
    flip_bit(random.Random(3), tensors)
    assert not any(t.any() for t in tensors)


def run_it(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_that_cannot_be_read_starts_nothing(tmp_path: Path) -> None:
    faults, script = tmp_path / "faults.txt", tmp_path / "train.py"
    script.touch()
    common = ("--run-dir", str(tmp_path / "run"), "--faults", str(faults), str(script))
    done = run_it(*common)
    assert (done.returncode, "cannot be read" in done.stderr) == (2, True)
    faults.write_text("worker 1 step 2 dance")
    done = run_it(*common)
    assert done.returncode == 2
    assert "'worker 1 step 2 dance' is not" in done.stderr
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- real jobs


def disturbed(tmp_path: Path, text: str) -> tuple[str, str]:
    faults = tmp_path / "faults.txt"
    faults.write_text(text)
    return "--faults", str(faults)


@pytest.mark.parametrize(
    ("factor", "share", "fault"),
    [
        pytest.param(2.5, 3, "", marks=pytest.mark.slow),
        pytest.param(2.5, 3, "worker 0 step 14 kill", marks=pytest.mark.slow),
        pytest.param(8, 4, "worker 0 step 14 kill", marks=pytest.mark.slow),
    ],
)
def test_a_slow_worker_hosts_less_and_no_bit_changes(
    factor: float, share: int, fault: str, start: Start, reference: Reference, tmp_path: Path
) -> None:
    """The other worker may die, too, which hosts more than in the view, or all tasks."""
    options = disturbed(tmp_path, f"worker 1 from step 1 slow {factor}\n{fault}\n")
    script = ("--steps", str(STEPS), "--task-s", "0.02")
    with start(*script, nproc=2, options=options) as run:
        assert finish(run) == reference(STEPS)
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    (first, *_) = run.events("balance")
    assert f"worker 0 hosts {share} virtual ranks instead of 2" in first["text"]
    assert "worker 1 is slow" in run.events("slow")[0]["text"]
    assert bool(run.events("lost")) == bool(fault)


@pytest.mark.slow
def test_nothing_moves_when_that_is_not_wanted(start: Start, tmp_path: Path) -> None:
    options = (*disturbed(tmp_path, "worker 1 from step 1 slow 5"), "--no-rebalance")
    with start("--steps", "12", "--task-s", "0.01", nproc=2, options=options) as run:
        finish(run)
    assert run.events("balance") == []


@pytest.mark.slow
def test_bits_do_not_depend_on_how_often_work_moves(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    """Each worker in turn is the slow one."""
    spans = itertools.pairwise(range(0, 61, 12))
    lines = [f"worker {i % 2} steps {a}-{b - 1} slow 6" for i, (a, b) in enumerate(spans)]
    options = disturbed(tmp_path, "\n".join(lines))
    script = ("--steps", "60", "--task-s", "0.01")
    with start(*script, nproc=2, options=options) as run:
        assert finish(run) == reference(60)
    assert len(run.events("balance")) > 1
    assert run.events("view")[1:] == []  # no new view was needed


# ---------------------------------------------------------------- late workers

LATE = ("--steps", "50", "--task-s", "0.05")


def told(run: LocalRun, what: str) -> list[str]:
    return [event["text"] for event in run.events("view") if what in event["text"]]


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2, 3])
def test_a_late_worker_is_suspended_and_catches_up(
    worker: int, start: Start, reference: Reference, tmp_path: Path
) -> None:
    """This holds for the leader and the last worker, too.

    The suspended worker keeps its process and its state, and applies the steps that it has missed.
    """
    options = disturbed(tmp_path, f"worker {worker} step 20 stall 2.0")
    with start(*LATE, options=options) as run:
        assert finish(run) == reference(50)
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    assert told(run, f"worker {worker} is late in step 20 and is suspended")
    assert told(run, f"worker {worker} joins")
    assert run.events("lost") == []
    log = run.run_dir.path / "logs"
    assert not [path.name for path in log.rglob(f"worker-{worker}-2*")]  # no second incarnation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "faults"),
    [
        pytest.param(10, "worker 2 step 10 stall 60", id="it has missed too much"),
        pytest.param(
            20, "worker 2 step 20 stall 2.5\nworker 3 step 22 kill", id="who kept some of it dies"
        ),
    ],
)
def test_a_worker_that_cannot_catch_up_is_replaced(
    step: int, faults: str, start: Start, reference: Reference, tmp_path: Path
) -> None:
    with start(*LATE, options=disturbed(tmp_path, faults)) as run:
        assert finish(run) == reference(50)
    assert told(run, f"worker 2 is late in step {step} and is suspended")
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok


@pytest.mark.slow
def test_without_a_budget_everybody_is_waited_for(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    faults = disturbed(tmp_path, "worker 2 step 20 stall 2.0")
    with start(*LATE, options=(*faults, "--speculation-budget", "0")) as run:
        assert finish(run) == reference(50)
    assert told(run, "suspended") == []


@pytest.mark.slow
def test_tasks_of_late_workers_are_copied(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    """The first result is used; here the late worker comes back in time."""
    options = disturbed(tmp_path, "worker 2 step 20 stall 0.4\nworker 1 step 40 stall 0.4")
    with start(*LATE, options=options) as run:
        assert finish(run) == reference(50)
    copies = [event["text"] for event in run.events("copy")]
    assert any("computed a task for other workers, which were late" in text for text in copies), (
        copies
    )
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok


@pytest.mark.slow
def test_a_copy_of_a_late_task_is_an_audit_for_free(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    """No other task is audited here. If the machine is too busy to copy, the job runs again."""
    faults = "worker 2 step 20 flip gradient\nworker 2 step 20 stall 0.4"
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with start(*LATE, options=disturbed(folder, faults)) as run:
            digest = finish(run)
        found = [text for text in wrong(run) if "a copy of virtual rank" in text]
        if found or told(run, "worker 2 is late in step 20"):  # suspended: its copy counts
            break
    assert found or told(run, "worker 2 is late in step 20")
    assert digest == reference(50)


# ---------------------------------------------------------------- wrong bits


AUDITED = ("--steps", "20")


def wrong(run: LocalRun) -> list[str]:
    return [event["text"] for event in run.events("wrong")]


@pytest.mark.parametrize(
    "nproc", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_audits_change_nothing(nproc: int, start: Start, reference: Reference) -> None:
    with start(*AUDITED, nproc=nproc, options=("--audit", "1.0")) as run:
        assert finish(run) == reference(20)
    assert wrong(run) == []
    assert run.events("lost") == []


@pytest.mark.parametrize(
    "nproc", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_wrong_gradient_is_computed_again(
    nproc: int, start: Start, reference: Reference, tmp_path: Path
) -> None:
    options = (*disturbed(tmp_path, "worker 1 step 7 flip gradient"), "--audit", "1.0")
    with start(*AUDITED, nproc=nproc, options=options) as run:
        assert finish(run) == reference(20)
    (text,) = wrong(run)
    assert "worker 1 has computed virtual rank" in text
    assert "of step 7 wrongly; the step was computed again" in text
    assert run.events("lost") == []  # the first mistake is forgiven
    (incident,) = (each for each in list_incidents(run.events()) if each.title == text)
    assert (incident.workers, incident.diagnosis.fault) == ({1}, Party.MACHINE)
    assert incident.to_dict()["node"] == "node0"
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        pytest.param(
            1e-6, "audits compare within 0.01 of a gradient's norm", marks=pytest.mark.slow
        ),
        pytest.param(0.5, "nothing is audited any more", marks=pytest.mark.slow),
    ],
)
def test_hardware_that_is_not_deterministic_is_audited_within_a_tolerance(
    noise: float, says: str, start: Start, tmp_path: Path
) -> None:
    """No worker is blamed for noise, but a worker that is off by more is found."""
    faults = f"any worker always noise {noise}\nworker 1 step 12 poison inf"
    repeats = ("--repeat-steps", "64" if noise < 0.01 else "0")  # repeats refuse so much noise
    options = (*disturbed(tmp_path, faults), "--audit", "1.0", *repeats)
    with start(*AUDITED, nproc=3, options=options) as run:
        finish(run)
    texts = wrong(run)
    assert [text for text in texts if says in text]
    blamed = [text for text in texts if "wrongly" in text]
    assert all("worker 1 has computed" in text and "step 12" in text for text in blamed)
    assert bool(blamed) == (noise < 0.01)
    assert run.events("lost") == []


@pytest.mark.slow
def test_a_worker_that_computes_wrongly_again_and_again_leaves(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    """Its successor, on the same machine, would do the same, so none is started for a while."""
    options = (*disturbed(tmp_path, "worker 1 from step 5 multiply wrongly"), "--audit", "1.0")
    with start(*AUDITED, nproc=3, options=options) as run:
        assert finish(run) == reference(20)
    assert all("worker 1 has computed" in text for text in wrong(run))
    assert (
        "worker 1 is left out for 60 s: it computes wrongly" in run.events("quarantined")[0]["text"]
    )


@pytest.mark.parametrize("what", ["parameter", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_a_replica_that_has_become_another_is_found_and_replaced(
    what: str, start: Start, reference: Reference, tmp_path: Path
) -> None:
    """It is found before its gradients are used; its successor gets the state of other workers."""
    options = (*disturbed(tmp_path, f"worker 1 step 7 flip {what}"), "--audit", "1.0")
    with start(*AUDITED, nproc=4, options=options) as run:
        assert finish(run) == reference(20)
    assert all("worker 1 has computed" in text for text in wrong(run))
    assert wrong(run)
    assert [event["worker"] for event in run.events("lost")] == [1]


def with_a_store(
    start: Start, tmp_path: Path, faults: str, *options: str, steps: int = 50, nproc: int = 3
) -> tuple[LocalRun, str]:
    """Run a job with these faults that keeps checkpoints; return its run and its digest."""
    store = ("--store", str(tmp_path / "store"), "--save-every", "5")
    script = ("--steps", str(steps), "--task-s", "0.01")
    with start(
        *script, nproc=nproc, options=(*disturbed(tmp_path, faults), *store, *options)
    ) as run:
        digest = finish(run)
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert (report.ok, report.inexact_since) == (True, None), report.findings
    return run, digest


@pytest.mark.parametrize(
    ("what", "step", "steps", "cycle"),
    [
        pytest.param("parameter", 7, 20, 4, marks=pytest.mark.slow),
        pytest.param("parameter", 27, 50, 8, marks=pytest.mark.slow),
        pytest.param("optimizer", 27, 50, 8, marks=pytest.mark.slow),
    ],
)
def test_a_state_that_has_become_another_is_found_without_audits_and_the_job_goes_back(
    what: str,
    step: int,
    steps: int,
    cycle: int,
    start: Start,
    reference: Reference,
    tmp_path: Path,
) -> None:
    """Its gradients have been used by then, so all of those steps are done again."""
    faults, compared = f"worker 1 step {step} flip {what}", ("--fingerprint-steps", str(cycle))
    run, digest = with_a_store(start, tmp_path, faults, *compared, steps=steps)
    assert digest == reference(steps)
    texts = wrong(run)
    assert any("the state of worker 1 is not that of the others in step" in t for t in texts)
    assert any("the job goes back" in text for text in texts)
    assert run.events("back")
    title = next(text for text in texts if "the state of worker 1" in text)
    (incident,) = (each for each in list_incidents(run.events()) if each.title == title)
    assert {"lost", "back", "view", "resumed"} <= {event["kind"] for event in incident.events}
    assert "ended by SIGKILL" not in str(incident.events)


@pytest.mark.slow
def test_steps_computed_wrongly_before_an_audit_found_out_are_redone(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    faults = "worker 1 from step 27 multiply wrongly"
    run, digest = with_a_store(start, tmp_path, faults, "--audit", "0.2")
    assert digest == reference(50)
    assert run.events("quarantined")


@pytest.mark.slow
def test_of_two_states_nobody_knows_which_is_right(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    """Both begin again from before they differed."""
    faults = "worker 0 step 27 flip parameter"
    options = ("--fingerprint-steps", "4")
    run, digest = with_a_store(start, tmp_path, faults, *options, steps=40, nproc=2)
    assert digest == reference(40)
    assert any("none has a majority" in text for text in wrong(run))


@pytest.mark.slow
def test_without_a_store_the_ledger_says_that_the_result_is_not_exact(
    start: Start, tmp_path: Path
) -> None:
    options = (*disturbed(tmp_path, "worker 1 step 7 flip parameter"), "--fingerprint-steps", "4")
    with start(*AUDITED, nproc=3, options=options) as run:
        finish(run)
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok
    assert report.inexact_since is not None
    assert 3 <= report.inexact_since <= 7
    assert any("there is no --store" in text for text in wrong(run))


@pytest.mark.parametrize(
    "nproc", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_sum_of_damaged_parts_is_summed_again(
    nproc: int, start: Start, reference: Reference, tmp_path: Path
) -> None:
    options = (*disturbed(tmp_path, "worker 1 step 7 flip received"), "--audit", "1.0")
    with start(*AUDITED, nproc=nproc, options=options) as run:
        assert finish(run) == reference(20)
    (text,) = wrong(run)
    assert "worker 1 has summed a part of step 7 wrongly, or received it damaged" in text
    assert run.events("lost") == []


@pytest.mark.parametrize(
    "what",
    [pytest.param("nan", marks=pytest.mark.slow), pytest.param("inf", marks=pytest.mark.slow)],
)
def test_a_number_that_is_none_is_never_committed(
    what: str, start: Start, reference: Reference, tmp_path: Path
) -> None:
    """No step is audited here, except the step with a sum that is not finite."""
    options = disturbed(tmp_path, f"worker 1 step 7 poison {what}")
    with start(*AUDITED, nproc=3, options=options) as run:
        assert finish(run) == reference(20)
    assert wrong(run) == [
        "worker 1 had numbers in step 7 that were not finite; computed again, they are"
    ]
    assert run.events("lost") == []


@pytest.mark.parametrize(
    "what",
    [pytest.param("nan", marks=pytest.mark.slow), pytest.param("inf", marks=pytest.mark.slow)],
)
def test_a_lone_worker_does_not_believe_such_a_number_either(
    what: str, start: Start, reference: Reference, tmp_path: Path
) -> None:
    options = disturbed(tmp_path, f"worker 0 step 7 poison {what}\nworker 0 step 9 poison {what}")
    with start("--steps", "20", nproc=1, options=options) as run:
        assert finish(run) == reference(20)
    assert wrong(run) == [
        f"worker 0 had numbers in step {step} that were not finite; computed again, they are"
        for step in (7, 9)
    ]
    assert run.events("lost") == []


def test_a_gradient_that_a_lone_worker_finds_not_finite_twice_is_blamed_on_the_script(
    start: Start, tmp_path: Path
) -> None:
    options = disturbed(tmp_path, "worker 0 step 3 overflow")
    with start("--steps", "6", nproc=1, options=options) as run:
        finish(run)
    (text,) = [event["text"] for event in run.events("not_finite")]
    assert text == "the gradient of step 3 is not finite, each time it is computed"


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_all_workers_is_committed(
    start: Start, tmp_path: Path
) -> None:
    options = disturbed(tmp_path, "any worker step 7 overflow")
    with start(*AUDITED, nproc=3, options=options) as run:
        finish(run)
    (text,) = [event["text"] for event in run.events("not_finite")]
    assert text == "the gradient of step 7 is not finite, on all workers that compute it"
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok


# ---------------------------------------------------------------- slow networks


@pytest.mark.slow
def test_a_slow_network_is_told_from_slow_computing(start: Start, tmp_path: Path) -> None:
    """The other workers compute as fast as the slow one does, and wait for its messages."""
    options = disturbed(tmp_path, "worker 0 always slow link 1e5")
    with start("--steps", "24", "--task-s", "0.05", nproc=3, options=options) as run:
        finish(run)
    told = [event["text"] for event in run.events("slow")]
    (text,) = [each for each in told if "network" in each or "link" in each]
    assert text.startswith("the network of worker 0 is slow: 2 of 2 others wait")
    assert not [each for each in told if each.startswith("worker 0")]
