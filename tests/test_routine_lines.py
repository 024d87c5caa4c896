"""Tests that routine lines are shown ever more seldom, and that no line is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.routine_lines import GAP_MAX_S, SUBJECTS_MAX, RoutineLines
from holdfast.runtime.job_events import EventSink, LoggedEvent, read_events

SLOW = "worker 1 is slow now and then: it takes 1.50 times as long (99.00% sure)"


def shown(every_s: float, hours: float, text: str = SLOW, kind: str = "slow") -> list[float]:
    lines = RoutineLines()
    times = [number * every_s for number in range(int(hours * 3600 / every_s))]
    return [now for now in times if lines.show(kind, text, now)]


def test_the_gaps_grow_to_an_hour() -> None:
    assert shown(10, 1.0) == [0, 60, 180, 420, 900, 1860]
    times = shown(10, 6.0)
    assert times[-1] - times[-2] == GAP_MAX_S


def test_other_events_are_always_shown() -> None:
    assert len(shown(10, 1.0, kind="wrong")) == 360


def test_each_worker_and_each_way_of_being_slow_counts_by_itself() -> None:
    lines = RoutineLines()
    texts = [SLOW, SLOW.replace("worker 1", "worker 2"), SLOW.replace(" now and then", "")]
    assert [lines.show("slow", text, 0.0) for text in texts] == texts
    assert [lines.show("slow", text, 1.0) for text in texts] == [""] * 3


def test_the_number_of_lines_that_were_passed_over_is_shown() -> None:
    lines = RoutineLines()
    told = [lines.show("balance", f"worker {n} hosts 2", 20.0 * n) for n in range(5)]
    assert told == [
        "worker 0 hosts 2",
        "",
        "",
        "worker 3 hosts 2 (2 more such lines in the event log)",
        "",
    ]


def test_memory_is_bounded() -> None:
    lines = RoutineLines()
    for number in range(2 * SUBJECTS_MAX):
        lines.show("slow", f"worker {number} is slow: x", 0.0)
    assert len(lines._subjects) == SUBJECTS_MAX


def test_the_log_has_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(path)
    for number in range(50):
        sink.write(LoggedEvent(time=float(number), kind="slow", text=SLOW))
    sink.write(LoggedEvent(time=50.0, kind="wrong", text="worker 1 has computed wrongly"))
    assert len(read_events(path)) == 51
    assert capsys.readouterr().err.splitlines() == [
        f"holdfast: {SLOW}",
        "holdfast: worker 1 has computed wrongly",
    ]
