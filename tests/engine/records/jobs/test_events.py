"""Tests of the event log's schema, of its readers, and of incidents in a real run."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import Start, finish
from holdfast.cli.main import main
from holdfast.engine.core.errors import NoAnswer, UserError
from holdfast.engine.records.incidents import (
    describe_cost,
    find_incident,
    list_incidents,
    parse_event,
    tell_story,
)
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.reports.commands import events_command
from holdfast.reports.commands.events_command import GONE_S, QUIET_S, CoordinatorWatch
from places import ROOT
from support import until

TIMES: dict[Any, str] = {
    0: "1970-01-01T00:00:00.000Z",
    1795000000.1256: "2026-11-18T11:06:40.125Z",
    253402300799.9999: "9999-12-31T23:59:59.999Z",
}
TOLD = re.compile(r'(?:Announce|EventNoted|\.say|\.note)\(\s*f?"([a-z_]+)",')


def event(kind: str, name: str, *causes: str, **more: Any) -> dict[str, Any]:
    text = f"{kind} {name}"
    return {"time": float(name), "kind": kind, "text": text, "id": name, "causes": causes, **more}


def test_every_kind_of_event_is_on_its_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "events.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", page.split("## Kinds")[1], re.MULTILINE))
    assert documented == {*TOLD.findall(source), "drain", "not_finite", "wait", "resumed"}


def test_incidents_are_events_linked_by_causes() -> None:
    cost = {"pause_s": 1.5, "tasks": 1, "steps": 0, "missing": 2}
    found = list_incidents(
        [
            event("view", "1"),
            event("lost", "2"),
            event("stop_view", "3", "2"),
            event("lost", "4"),
            event("view", "5", "2", "3", "4"),
            event("resumed", "6", "5", cost=cost),
            event("join", "7"),
            event("view", "8", "7"),
            event("lost", "9"),
        ]
    )
    assert [[e["id"] for e in each.events] for each in found] == [list("23456"), ["9"]]
    assert found[0].title == "lost 2"
    assert find_incident(found, "5") is found[0]
    assert tell_story(found[0])[-4] == (
        "Cost: 1.50 s until the next step, 1 task was computed by others, 2 workers fewer."
    )
    assert describe_cost(found[1]) == "its end was not recorded"
    with pytest.raises(UserError, match=r"'8'; the newest incidents: 2, 9$"):
        find_incident(found, "8")


def test_an_incident_goes_on_under_the_next_coordinator() -> None:
    cost = {"pause_s": 1.5, "tasks": 1, "steps": 0, "missing": 1}
    found = list_incidents(
        [
            event("lost", "1.1", worker=2),
            event("lost", "1.2", worker=3),
            event("resumed", "1.3", "1.2", cost=cost),
            event("elected", "2.1"),
            event("lost", "2.2", worker=2),
            event("view", "2.3", "2.2"),
            event("resumed", "2.4", "2.3", cost=cost),
            event("lost", "3.1", worker=3),
        ]
    )
    ids = [[e["id"] for e in each.events] for each in found]
    assert sorted(ids) == [["1.1", "2.2", "2.3", "2.4"], ["1.2", "1.3"], ["3.1"]]
    assert len(found[0].cost) == len(cost)


def test_a_later_loss_under_the_next_coordinator_is_an_incident_of_its_own() -> None:
    found = list_incidents(
        [
            event("lost", "1.1", worker=2),
            event("elected", "2.1"),
            event("view", "2.2"),
            event("lost", "2.3", worker=2),
        ]
    )
    assert [[e["id"] for e in each.events] for each in found] == [["1.1"], ["2.3"]]


def test_lines_with_a_time_that_is_none_are_left_out(tmp_path: Path) -> None:
    log, good = tmp_path / "events.jsonl", {"time": 1.0, "kind": "lost", "text": "gone"}
    odd: list[dict[str, Any]] = [{"time": "now"}, {"time": None}, {"kind": 3}, {"text": []}]
    log.write_text("".join(json.dumps({**good, **each}) + "\n" for each in [*odd, {}]))
    assert read_events(log) == [good]
    tail = RunTail(tmp_path)
    assert tail.look() == [good]


def test_a_log_that_is_a_pipe_or_a_folder_is_refused_and_nothing_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    (tmp_path / "job.json").touch()
    os.mkfifo(log)
    assert main(["events", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {log} cannot be read: ")
    log.unlink()
    log.mkdir()
    assert main(["events", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {log} cannot be read: ")


def test_events_and_incidents_in_json_have_their_times_in_iso_8601(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"kind": "lost", "text": "gone"}
    lines = [{"time": at, "id": f"1.{n}", **lost} for n, at in enumerate(TIMES)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "job.json").touch()
    assert main(["events", str(tmp_path), "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown == [{**line, "utc": TIMES[line["time"]]} for line in lines]
    assert main(["explain", str(tmp_path), "--json"]) == 0
    found = [e["utc"] for each in json.loads(capsys.readouterr().out) for e in each["events"]]
    assert found == [*TIMES.values()]


def test_lines_of_older_releases_and_half_lines_are_no_error(tmp_path: Path) -> None:
    log, old = tmp_path / "events.jsonl", {"time": 1.0, "kind": "lost", "text": "gone"}
    log.write_text(json.dumps(old) + '\n{"time": 2.0, "ki')
    assert read_events(log) == [old]
    assert list_incidents(read_events(log)) == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
def test_lines_with_numbers_that_are_not_finite_are_no_events(number: str) -> None:
    line = '{"time": 1.0, "kind": "resumed", "text": "x", "cost": {"pause_s": 7}}'
    assert parse_event(line) is not None
    assert parse_event(line.replace("7", number)) is None  # no viewer could write it as JSON


@pytest.mark.parametrize("command", ["events", "explain", "metrics", "report", "top", "trace"])
def test_a_directory_without_a_run_is_refused_in_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"holdfast: {tmp_path} holds no run: name the directory given as --run-dir\n"
    )


@pytest.mark.slow
def test_a_killed_worker_is_one_incident_with_its_cost(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with start("--steps", "12", "--fault", "SIGKILL:gather:4:2") as run:
        finish(run)
    path = str(run.run_dir.path)
    titled = {each.title[:17]: each for each in list_incidents(run.events())}
    incident = titled["worker 2 was lost"]  # a busy machine may add more
    assert {"lost", "view", "resumed"} <= {e["kind"] for e in incident.events}
    assert incident.cost["missing"] == 1
    assert incident.cost["tasks"] > 0
    ids = [e["id"] for e in run.events()]
    assert len(set(ids)) == len(ids)
    assert main(["explain", path]) == 0
    assert capsys.readouterr().out.count("worker 2 was lost") == 1
    assert main(["explain", path, incident.name]) == 0
    assert "Cost: " in capsys.readouterr().out
    assert main(["events", path, "--follow", "--kind", "lost", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker"] == 2


class Asked:
    """Stands for a coordinator: raises `problem`, and counts the questions."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.problem is not None:
            raise self.problem


def look_from(watch: CoordinatorWatch, begin: float, seconds: float) -> list[tuple[float, str]]:
    """Look five times a second; return the times and sentences of all news."""
    times = [begin + n / 5 for n in range(round(5 * seconds))]
    return [(now, news) for now in times if (news := watch.look(now))]


def test_a_coordinator_that_stays_away_is_told_of_once_and_its_return_as_well() -> None:
    asked = Asked()
    watch = CoordinatorWatch(asked, waits=True)
    assert look_from(watch, 0.0, 3 * QUIET_S) == []
    assert asked.count == 3  # not at each look
    asked.problem = NoAnswer("nobody is there")
    ((at, news),) = look_from(watch, 15.0, 60.0)
    assert at == pytest.approx(15.0 + GONE_S, abs=QUIET_S)
    assert news.startswith("the run has no end and no live coordinator: nobody is there; ")
    assert watch.is_gone
    asked.problem = None
    assert [news for _, news in look_from(watch, 75.0, 60.0)] == ["a coordinator answers again"]
    assert not watch.is_gone


def test_a_coordinator_that_is_replaced_or_cannot_be_asked_is_not_given_up() -> None:
    asked = Asked()
    watch = CoordinatorWatch(asked, waits=False)
    asked.problem = NoAnswer("nobody is there")
    assert look_from(watch, 0.0, GONE_S) == []
    watch.note_event(GONE_S)  # its successor has written one
    assert look_from(watch, GONE_S, QUIET_S + GONE_S) == []
    asked.problem = UserError("--tls is missing")
    assert look_from(watch, 100.0, 10 * GONE_S) == []
    assert not watch.is_gone


@pytest.mark.slow
def test_a_follower_of_events_learns_that_the_run_has_crashed(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(events_command, "QUIET_S", 0.5)
    monkeypatch.setattr(events_command, "GONE_S", 0.5)
    gate = tmp_path / "gate"
    with start("--steps", "4", "--hold", "2", str(gate), nproc=1) as run:
        run.until_members(1)
        strike(run.pid)
        until(lambda: not run.leftovers(), "the end of all processes")
        path = str(run.run_dir.path)
        assert main(["events", path, "--follow"]) == 3
        told = capsys.readouterr()
        assert len(told.out.splitlines()) == len(run.events())
        (line,) = told.err.splitlines()
        assert line.startswith("holdfast: the run has no end and no live coordinator: ")

        with ThreadPoolExecutor() as threads:
            follower = threads.submit(main, ["events", path, "--follow", "--wait"])
            until(lambda: "no live coordinator" in capsys.readouterr().err, "the news")
            gate.touch()
            with LocalRun(run.run_dir.path, [], [], command=("resume", path)) as again:
                finish(again)
            assert follower.result(60) == 0
