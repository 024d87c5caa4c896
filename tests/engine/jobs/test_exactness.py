"""Real processes, real signals: the last line of every run is the undisturbed run's digest."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import SCRIPTS, Start, finish
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.data.sampling import SamplePlan

STEPS = 12
Reference = Callable[[int], str]


def check_ledger(run: LocalRun, steps: int) -> None:
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    assert report.steps == steps
    assert (report.lost, report.repeated) == (0, 0)


@pytest.mark.parametrize(
    "nproc",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_workers_does_not_matter(
    nproc: int, start: Start, reference: Reference
) -> None:
    with start("--steps", str(STEPS), nproc=nproc) as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)
    assert run.events("lost") == []


@pytest.mark.slow
def test_data_loader_processes_do_not_matter(start: Start, reference: Reference) -> None:
    fault = "SIGKILL:forward:4:1"
    with start("--steps", str(STEPS), "--loaders", "2", "--fault", fault, nproc=2) as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)


# Every place of a step at which a worker can die; worker 0 leads, so it is struck as well. Deaths
# at any exchange are in test_thread_cluster.py, too: in threads, and so in a fraction of a
# second each.
KILLS = [
    pytest.param("SIGKILL:forward:4:1", marks=pytest.mark.slow),
    pytest.param("SIGKILL:backward:4:0", marks=pytest.mark.slow),
    "SIGKILL:gather:4:2",
    pytest.param("SIGKILL:spread:4:3", marks=pytest.mark.slow),
    pytest.param("SIGKILL:table:4:1", marks=pytest.mark.slow),
    "SIGKILL:vote:4:0",
    "SIGKILL:voted:4:2",
    pytest.param("SIGKILL:optimizer:4:0", marks=pytest.mark.slow),
    pytest.param("SIGKILL:stepped:4:1", marks=pytest.mark.slow),
    pytest.param("SIGKILL:forward:0:3", marks=pytest.mark.slow),
    pytest.param("SIGKILL:forward:4:0,1", marks=pytest.mark.slow),
    "SIGKILL:vote:4:0,1,2",
    pytest.param("SIGKILL:end:11:0", marks=pytest.mark.slow),
    "SIGSEGV:backward:4:2",
]


@pytest.mark.slow_with(
    "SIGKILL:vote:4:0", "SIGKILL:vote:4:0,1,2", "SIGKILL:voted:4:2", "SIGSEGV:backward:4:2"
)
@pytest.mark.parametrize("fault", KILLS)
def test_a_kill_at_any_point_of_a_step(fault: str, start: Start, reference: Reference) -> None:
    with start("--steps", str(STEPS), "--fault", fault) as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)
    victims = [int(w) for w in fault.split(":")[3].split(",")]
    assert sorted(e["worker"] for e in run.events("lost")) == victims


def test_the_lost_worker_comes_back(start: Start, reference: Reference) -> None:
    args = ["--steps", str(STEPS), "--fault", "SIGKILL:forward:4:1", "--rejoin", "7"]
    with start(*args) as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)
    views = [e["text"] for e in run.events("view")]
    assert any("workers 0-3;" in text for text in views[2:]), views


# (faults, workers lost): faults while a view changes or while the state travels.
DURING_CHANGES = [
    (["SIGKILL:forward:4:1", "SIGKILL:open:4:2"], [1, 2]),
    pytest.param(["SIGKILL:forward:4:1", "SIGKILL:donate:0:0"], [0, 1], marks=pytest.mark.slow),
    (["SIGKILL:forward:4:1", "SIGKILL:donate:0:3"], [1, 3]),
    (["SIGKILL:forward:4:1", "SIGKILL:receive:0:1"], [1, 1]),
    pytest.param(["SIGKILL:forward:4:1", "SIGKILL:load:0:1"], [1, 1], marks=pytest.mark.slow),
]


@pytest.mark.slow_with("faults0-lost0", "faults2-lost2", "faults3-lost3")
@pytest.mark.parametrize(("faults", "lost"), DURING_CHANGES)
def test_a_kill_during_a_view_change_or_a_state_transfer(
    faults: list[str], lost: list[int], start: Start, reference: Reference
) -> None:
    args = [word for fault in faults for word in ("--fault", fault)]
    with start("--steps", str(STEPS), "--rejoin", "7", *args) as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)
    assert sorted(e["worker"] for e in run.events("lost")) == lost


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_amid_large_messages(tmp_path: Path) -> None:
    """30 million parameters: kills at random moments mostly leave messages half read."""
    model = ("--width", "768", "--layers", "4", "--context", "32", "--batch-size", "2")
    words = [str(SCRIPTS.parents[1] / "examples" / "gpt.py"), "--steps", "15", *model]
    options = ["--nproc", "3", "--virtual", "3", "--losses-max", "300"]
    with LocalRun(tmp_path / "calm", options, words) as run:
        assert run.wait(300.0) == 0, run.log()
        expected = run.out[-1]
    rng, pause = random.Random(0), threading.Event()
    kills = 0
    with LocalRun(tmp_path / "run", options, words) as run:
        while kills < 8 and run.is_running():
            pause.wait(rng.uniform(0.5, 2.5))
            pids = list(run.members().values())
            kills += bool(pids) and strike(rng.choice(pids))
        assert run.wait(300.0) == 0, run.log()
        assert run.out[-1] == expected
    assert kills > 3


@pytest.mark.parametrize(
    "point",
    [
        "forward",
        pytest.param("spread", marks=pytest.mark.slow),
        pytest.param("vote", marks=pytest.mark.slow),
        pytest.param("optimizer", marks=pytest.mark.slow),
    ],
)
def test_a_freeze_at_any_point_of_a_step(point: str, start: Start, reference: Reference) -> None:
    with start("--steps", str(STEPS), "--fault", f"SIGSTOP:{point}:4:2") as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)
    (lost,) = run.events("lost")
    assert lost["worker"] == 2
    assert "frozen" in lost["text"]


@pytest.mark.slow
def test_every_worker_lost_starts_again_and_ends_the_same(
    start: Start, reference: Reference
) -> None:
    with start("--steps", str(STEPS), "--fault", "SIGKILL:forward:5:0,1", nproc=2) as run:
        assert finish(run) == reference(STEPS)
    assert any("every worker was lost" in e["text"] for e in run.events("view"))
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings


@pytest.mark.slow
def test_the_job_waits_while_there_are_too_few_workers(start: Start, reference: Reference) -> None:
    args = ["--steps", str(STEPS), "--fault", "SIGKILL:forward:4:1"]
    with start(*args, nproc=2, options=("--min-workers", "2")) as run:
        assert finish(run) == reference(STEPS)
    check_ledger(run, STEPS)
    assert len(run.events("wait")) == 1
    last = run.events("view")[-1]
    assert last["text"].startswith("view 3: workers 0, 1"), last
    assert last["step"] == 5, "step 4 was redone by the survivor; step 5 waited for the other"
