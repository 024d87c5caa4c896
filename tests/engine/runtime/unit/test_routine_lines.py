"""Tests that routine lines are shown ever more seldom, or not at all, and that none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.core.routine_lines import GAP_MAX_S, SUBJECTS_MAX, RoutineLines
from holdfast.engine.runtime.job_events import EventSink, LoggedEvent, read_events
from holdfast.engine.runtime.outlet import flush_outlets

SLOW = "worker 1 is a straggler: a task took it 2.0 times as long"


def shown(every_s: float, hours: float, text: str = SLOW, kind: str = "straggler") -> list[float]:
    lines = RoutineLines()
    times = [number * every_s for number in range(int(hours * 3600 / every_s))]
    return [now for now in times if lines.show(kind, text, now)]


def test_the_gaps_grow_to_an_hour() -> None:
    assert shown(10, 1.0) == [0, 60, 180, 420, 900, 1860]
    times = shown(10, 6.0)
    assert times[-1] - times[-2] == GAP_MAX_S


def test_slow_workers_and_balance_stay_in_the_log_and_busy_machines_are_named_once() -> None:
    assert shown(10, 1.0, kind="slow") == shown(10, 1.0, kind="balance") == []
    assert shown(10, 6.0, kind="busy") == [0]


def test_other_events_are_always_shown() -> None:
    assert len(shown(10, 1.0, kind="wrong")) == 360


def test_each_worker_counts_by_itself() -> None:
    lines = RoutineLines()
    texts = [SLOW, SLOW.replace("worker 1", "worker 2")]
    assert [lines.show("straggler", text, 0.0) for text in texts] == texts
    assert [lines.show("straggler", text, 1.0) for text in texts] == [""] * 2


def test_the_number_of_lines_that_were_passed_over_is_shown() -> None:
    lines = RoutineLines()
    told = [lines.show("straggler", f"worker 1 is slow: {n}", 20.0 * n) for n in range(5)]
    assert told == [
        "worker 1 is slow: 0",
        "",
        "",
        "worker 1 is slow: 3 (2 more such lines in the event log)",
        "",
    ]


def test_memory_is_bounded() -> None:
    lines = RoutineLines()
    for number in range(2 * SUBJECTS_MAX):
        lines.show("straggler", f"worker {number} is slow: x", 0.0)
    assert len(lines._subjects) == SUBJECTS_MAX


def test_the_log_has_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(path)
    for number in range(50):
        sink.write(LoggedEvent(time=float(number), kind="straggler", text=SLOW))
    sink.write(LoggedEvent(time=50.0, kind="wrong", text="worker 1 has computed wrongly"))
    flush_outlets()
    assert len(read_events(path)) == 51
    assert capsys.readouterr().err.splitlines() == [
        f"holdfast: {SLOW}",
        "holdfast: worker 1 has computed wrongly",
    ]
