"""The story of an incident has the last lines that its lost workers printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import RUN_S, Start
from dashboard_kit import BEGAN, write_event
from holdfast.cli.main import main
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.records.incidents import list_incidents
from holdfast.engine.records.last_words import LINES_MAX, WIDTH_MAX, find_last_words
from holdfast.engine.records.time_lines import (
    ProcessHeader,
    SpentLine,
    TimesWriter,
    TimeUse,
    times_path,
)
from holdfast.engine.runtime.local_run import strike
from holdfast.engine.runtime.rundir import RunDir, read_run_events

SCRIPT = """
import sys, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=2)
for step in job.steps(data, until=100_000):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    print("worker", sys.argv[1], "is after step", step.index, flush=True)
"""


def write_process(run_dir: Path, incarnation: int, began_s: float, log: str) -> None:
    header = ProcessHeader(worker=1, incarnation=incarnation, began=BEGAN + began_s)
    writer = TimesWriter(times_path(run_dir, 1, incarnation), header)
    writer.append(SpentLine(0, {TimeUse.STARTING: 1.0}))
    (run_dir / "logs" / f"worker-1-{incarnation}.log").write_text(log)


def test_each_loss_has_the_log_of_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDir(tmp_path).create(JobSpec(job="a" * 32, cwd="/", script="train.py"), bytes(32))
    write_process(tmp_path, 9, 0.0, "".join(f"line {n}\n\n" for n in range(20)))
    write_process(tmp_path, 10, 11.0, "x" * 999 + "\n")
    write_process(tmp_path, 11, 21.0, "I live\n")
    write_event(tmp_path, "lost", "worker 1 was lost", 10.0, worker=1, id="1.1")
    write_event(tmp_path, "lost", "worker 1 was lost", 20.0, worker=1, id="1.2")
    write_event(tmp_path, "lost", "worker 7 was lost", 20.0, worker=7, id="1.3")
    write_event(tmp_path, "lost", "some worker was lost", 20.0, id="1.4")
    found = [
        find_last_words(tmp_path, each)
        for each in list_incidents(read_run_events(RunDir(tmp_path)))
    ]
    assert found == [
        ["The end of logs/worker-1-9.log:", *(f"  | line {n}" for n in range(20 - LINES_MAX, 20))],
        ["The end of logs/worker-1-10.log:", f"  | {'x' * WIDTH_MAX}"],
        [],
        [],
    ]
    assert main(["explain", str(tmp_path), "1.1"]) == 0
    assert "\n".join(found[0]) in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "1.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last_words"] == found[0]


@pytest.mark.slow
def test_a_killed_workers_last_lines_are_in_its_story(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with start("W", nproc=2, script=str(script)) as run:
        worker, pid = max(run.until_members(2).items())
        log = run.run_dir.logs / f"worker-{worker}-1.log"
        run.until(lambda: log.exists() and "after step" in log.read_text(), RUN_S, "its lines")
        strike(pid)
        run.until(lambda: run.events("lost"), RUN_S, "its loss")
        name = run.events("lost")[0]["id"]
        assert main(["explain", str(run.run_dir.path), name]) == 0
    told = capsys.readouterr().out
    assert f"The end of logs/worker-{worker}-1.log:\n  | " in told
    assert "worker W is after step" in told
