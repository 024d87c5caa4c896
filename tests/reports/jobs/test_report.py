"""The report of a real run: its figures agree with those seen from outside, and sum up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conftest import Start, finish
from goodput_kit import goodput_of
from holdfast.cli.main import main
from holdfast.engine.records.incidents import Part, list_incidents
from holdfast.engine.records.summary import describe_seconds
from holdfast.reports.charts import nice_ticks, thin_points

TASK_S = 0.05


@pytest.mark.slow
def test_a_disturbed_run_is_told_as_it_was(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time()
    with start("--steps", "20", "--task-s", str(TASK_S), "--fault", "SIGKILL:gather:6:2") as run:
        finish(run)
        ended = time.time()
        path = run.run_dir.path
        found = goodput_of(run)
        log = run.log()
    assert began <= found.began <= found.ended <= ended
    assert found.workers == [0, 1, 2, 3]
    assert found.steps == 20
    parts = found.parts()
    # Each of the 20 steps has 4 tasks that take so long, whoever computes them; repeats are checks.
    computed_s = parts[Part.PRODUCTIVE] + parts[Part.AGAIN]
    assert computed_s >= 20 * 4 * TASK_S * 0.9
    assert parts[Part.AGAIN] >= TASK_S * 0.9  # the lost worker's task of step 6
    assert parts[Part.STALLED] > 0
    assert found.parts(2)[Part.DEGRADED] > 0
    assert found.parts(0)[Part.DEGRADED] < 0.5  # between its last line and the end of the run
    assert sum(found.step_counts.values()) >= 3 * 15
    assert found.step_quantile(0.5) >= TASK_S
    assert parts[Part.PRODUCTIVE] / found.total_s < found.ettr < 1
    assert [cost.incident for cost in found.costs] == list_incidents(run.events())
    (cost,) = (c for c in found.costs if "worker 2 was lost" in c.incident.title)
    assert cost.parts[Part.STALLED] <= parts[Part.STALLED]
    assert cost.seconds >= cost.parts[Part.DEGRADED] > 0

    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found.to_dict()
    assert main(["report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [f"holdfast: {line}" in log for line in lines[:3]] == [True] * 3  # as the run ended with
    page = (path / "report.html").read_text()
    assert page.count("<svg") == 3 + 3 * page.count("<h2>Machines</h2>")  # after five seconds
    assert "worker 2 was lost" in page
    assert str(found.steps) in page

    assert not any("coordinator" in line for line in lines)
    (path / "result.json").unlink()  # as if all processes had been killed
    assert main(["report", str(path)]) == 0
    (said,) = (x for x in capsys.readouterr().out.splitlines() if "no live coordinator" in x)
    assert f"`holdfast resume {path}` goes on with it" in said


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_named(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start("--steps", "2", nproc=1) as run:
        finish(run)
    assert main(["report", str(run.run_dir.path), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"holdfast: {tmp_path} cannot be written: Is a directory\n"


def test_durations_are_written_as_people_read_them() -> None:
    assert [describe_seconds(s) for s in (0.0, 0.00123, 0.5)] == ["0 ms", "1.23 ms", "500 ms"]
    assert [describe_seconds(s) for s in (1.0, 119.0, 121)] == ["1 s", "119 s", "2 min 1 s"]
    assert [describe_seconds(s) for s in (7300, 200_000)] == ["2 h 1 min", "2 d 7 h"]


def test_ticks_are_round_and_cover_the_range() -> None:
    assert nice_ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.13, 0.31) == pytest.approx([0.15, 0.2, 0.25, 0.3])
    assert nice_ticks(5.0, 5.0) == [5.0]


def test_a_long_line_keeps_its_extremes() -> None:
    points = [(float(i), 0.0) for i in range(100_000)]
    points[777] = (777.0, 9.0)
    points[778] = (778.0, -9.0)
    found = thin_points(points)
    assert len(found) <= 1300
    assert {(777.0, 9.0), (778.0, -9.0)} <= set(found)
