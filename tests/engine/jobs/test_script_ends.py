"""How a script may end: its own report counts as success, an exit status alone never does."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, Start, finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node import bootstrap
from holdfast.engine.runtime.node.shard_processes import FOR_USER, ShardProcesses, read_report

STEPS = 8
TRACEBACK = "Traceback (most recent call last):\nValueError: it fails"
Reference = Callable[[int], str]
QUITS = """
import os, sys, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
dataset = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
data = job.batches(dataset, batch_size=2)

def evaluated(batch):
    sys.exit(0)

def leave(step):
    sys.exit(0)

if sys.argv[1] == "callback":
    job.on_step_end(leave)
for step in job.steps(data, until=4):
    for x, y in step:
        if sys.argv[1] == "task" and step.index == 2:
            sys.exit(0)
        step.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if sys.argv[1] == "loop" and step.index == 2:
        sys.exit(0)
    if sys.argv[1] == "leader" and job.is_leader and step.index == 2:
        sys.exit(0)
if sys.argv[1] == "evaluation":
    job.evaluate(evaluated, dataset, batch_size=2)
print("done", flush=True)
"""


def quits(folder: Path, where: str, *options: str, nproc: int = 1) -> LocalRun:
    script = folder / "quits.py"
    script.write_text(QUITS)
    flags = ["--nproc", str(nproc), "--virtual", "2", *options]
    return LocalRun(folder / "run", flags, [str(script), where])


@pytest.mark.slow
def test_a_leader_that_exits_with_status_0_in_a_step_is_lost_like_any_other(
    start: Start, reference: Reference
) -> None:
    with start(
        "--steps", str(STEPS), "--fault", "EXIT:forward:3:0", "--rejoin", "5", nproc=2
    ) as run:
        assert finish(run) == reference(STEPS)
    (lost,) = run.events("lost")
    assert "worker 0 was lost: the script ended its process" in lost["text"]


@pytest.mark.slow
def test_a_script_that_always_exits_there_ends_the_job_with_a_sentence(start: Start) -> None:
    options = ("--losses-max", "1")
    with start("--fault", "EXITS:forward:2:0", nproc=1, options=options) as run:
        assert run.wait(RUN_S) == 1
    said = [line for line in run.err if "--losses-max" in line]
    assert "the last one: the script ended its process with exit status 0" in said[-1]
    assert not any("Traceback" in line for line in run.err)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["task", "evaluation", "callback"])
def test_sys_exit_in_the_middle_of_something_ends_the_job_with_a_sentence(
    where: str, tmp_path: Path
) -> None:
    with quits(tmp_path, where) as run:
        assert run.wait(RUN_S) == 1
    assert any("failed: sys.exit(0) in " in line for line in run.err), run.log()
    assert not any("Traceback" in line for line in run.err)


@pytest.mark.parametrize(
    ("others", "own", "told"),
    [
        (TRACEBACK, "a process of this worker was lost", TRACEBACK),
        ("the script ended with exit code 1", TRACEBACK, "the script ended with exit code 1"),
        (TRACEBACK, f"{FOR_USER}give --losses-max more", "give --losses-max more"),
    ],
)
def test_the_first_failure_is_told_unless_the_user_can_mend_another(
    others: str, own: str, told: str
) -> None:
    reading, writing = os.pipe()
    together = ShardProcesses([], writing)
    together._failures = [b"process 1 of the worker: " + others.encode()]
    together.report(own)
    prefix = "" if "losses" in told else "process 1 of the worker: "
    assert read_report(os.read(reading, 1 << 16)) == (prefix + told, None)
    os.close(reading)
    os.close(writing)


@pytest.mark.slow
def test_sys_exit_between_two_steps_ends_the_loop_as_break_does(tmp_path: Path) -> None:
    with quits(tmp_path, "loop") as run:
        assert finish(run) == ""
    assert run.run_dir.result.exists()


@pytest.mark.slow
def test_a_script_for_torchrun_may_end_by_os_exit(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "torchrun_odd.py"), "quit"]
    with LocalRun(tmp_path / "run", ["--compat", "--nproc", "2"], script) as run:
        assert run.wait(RUN_S) == 0, run.log()


def test_a_sentence_for_the_user_names_the_line_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    script = tmp_path / "models" / "train.py"
    values = "from holdfast.engine.train.script.script_state import Values"
    script.write_text(f"{values}\n\ndef keep():\n    Values()['x'] = {{1}}\n\nkeep()\n")
    with pytest.raises(UserError) as caught:
        runpy.run_path(str(script))
    told = bootstrap.describe(caught.value)
    assert told.startswith(f"{FOR_USER}job.values['x'] is a builtins.set")
    assert told.endswith(" (models/train.py, line 4)")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert bootstrap.describe(caught.value).endswith(" (train.py, line 4)")
    assert bootstrap.describe(UserError("x")) == f"{FOR_USER}x"


@pytest.mark.parametrize(
    "shares", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["copies", "shares"]
)
def test_a_leader_that_exits_alone_between_two_steps_is_named_with_both_places(
    shares: bool, tmp_path: Path
) -> None:
    options = ("--shard-optimizer", "--store", str(tmp_path / "store")) if shares else ()
    with quits(tmp_path, "leader", *options, nproc=2) as run:
        assert run.wait(RUN_S) == 1
    (said,) = {line for line in run.err if "has left its loop after step 3" in line}
    assert "where that of worker 1 begins another step (quits.py, line" in said
