"""The dashboard's server: access, files, and how updates reach clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from conftest import Start, finish
from dashboard_kit import BEGAN, LIMIT_S, SCRIPT, Dashboard, write_crashed_run, write_event
from holdfast.cli.main import main
from holdfast.engine.net.web_server import OwnNames
from holdfast.engine.records.ledger import DoubtLine, LedgerWriter, ledger_path
from holdfast.engine.records.run_tail import FileTail, read_log_end
from holdfast.engine.records.time_lines import ProcessTimes, SpentLine, TimeUse
from holdfast.reports.commands import dashboard_command
from holdfast.reports.dashboard.feed import Client, Feed
from holdfast.reports.dashboard.run_files import LossSeries, measure_rates, rate_now
from labs.local_nodes import LocalNodes

PAGES = (
    "/",
    "/api/state",
    "/api/stream",
    "/api/log?worker=0",
    "/api/usage?node=near",
    "/static/main.js",
)
URL = re.compile(r"^holdfast: dashboard: (http://127\.0\.0\.1:\S+)$", re.MULTILINE)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    path = tmp_path / "crashed"
    write_crashed_run(path)
    return path


@pytest.fixture
def dashboard(crashed: Path) -> Iterator[Dashboard]:
    with Dashboard(crashed) as found:
        yield found


def test_nobody_gets_in_without_the_token(dashboard: Dashboard) -> None:
    sentence = "The token is missing or wrong: use the URL that the dashboard has printed.\n"
    for path in PAGES:
        assert dashboard.ask(path)[:2] == (403, sentence)
        assert dashboard.ask(path, cookie=f"{dashboard.cookie}x")[:2] == (403, sentence)
    assert dashboard.ask(f"/?token={dashboard.token[:-1]}")[:2] == (403, sentence)
    assert dashboard.ask("/?token=%FF%00", cookie="a=\x01")[0] == 403


def test_the_token_of_the_url_becomes_a_cookie(dashboard: Dashboard) -> None:
    status, page, headers = dashboard.ask(f"/?token={dashboard.token}")
    assert (status, "<!doctype html>" in page) == (200, True)
    assert headers["set-cookie"] == f"{dashboard.cookie}; Path=/; HttpOnly; SameSite=Strict"
    assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    for path in ("/", "/static/main.js", "/static/dashboard.css", "/api/state"):
        assert dashboard.ask(path, cookie=dashboard.cookie)[0] == 200


def test_a_foreign_host_is_refused(dashboard: Dashboard) -> None:
    def ask(host: str) -> int:
        return dashboard.ask("/api/state", cookie=dashboard.cookie, host=host)[0]

    port = dashboard.port
    assert [ask(f"{name}:{port}") for name in ("127.0.0.1", "localhost")] == [200, 200]
    foreign = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1")
    assert [ask(f"{name}:{port}") for name in foreign] == [403] * 4
    assert ask("127.0.0.1") == 403
    assert ask(f"localhost:{port - 1}") == 403


def test_hosts_of_other_addresses() -> None:
    named = OwnNames.collect("node7", 80)
    assert [named.is_own(h) for h in ("node7:80", "NODE7:80", "node8:80")] == [True, True, False]
    anywhere = OwnNames.collect("0.0.0.0", 80)
    names = ("10.0.0.1:80", "[fe80::1]:80", "localhost:80", "evil.example:80")
    assert [anywhere.is_own(name) for name in names] == [True, True, True, False]
    assert OwnNames.collect("::1", 80).is_own("[::1]:80")


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_html() -> None:
    static = Path(dashboard_command.__file__).parents[1] / "dashboard" / "static"
    for path in static.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text, path  # noqa: PT018
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, path
        assert " style=" not in text.replace("<path style", "")


def test_the_files_of_a_crashed_run_are_shown(dashboard: Dashboard) -> None:
    state = dashboard.until("goodput", "loss", "incidents", "link", "troubles")
    assert state["run"]["script"] == SCRIPT
    assert state["run"]["outcome"] is None
    assert state["link"]["state"] == "lost"
    assert "coordinator.json does not exist" in state["link"]["text"]
    assert state["status"] is None
    assert state["events"]["first"] == 0
    assert [e["kind"] for e in state["events"]["items"]] == ["view", "lost", "view", "resumed"]
    (incident,) = state["incidents"]["items"]
    assert incident["title"] == f"worker 1 was lost: {SCRIPT}"
    assert incident["pause_s"] == 0.75
    assert incident["story"][3:9] == [
        "The end of logs/worker-1-1.log:",
        *(f"  | line {number}" for number in range(295, 300)),
    ]
    assert len(incident["story"]) == 12  # before: three events; after: cause, fault, and advice
    assert state["machines"] == ["near"]
    assert state["goodput"]["steps"] == 20
    assert 0 < state["goodput"]["share"] < 1
    assert state["loss"]["last"] == 19.5
    assert state["loss"]["points"][2:5] == [[2, 2.5], [3, None], [4, 4.5]]
    assert [e["kind"] for e in state["troubles"]] == ["lost"]
    assert [(w["id"], w["node"], w["step"]) for w in state["known"]] == [
        (0, None, 20),
        (1, None, 10),
    ]
    assert state["rates"]["now"] == pytest.approx(1.0)


def test_lines_that_are_appended_reach_the_client(dashboard: Dashboard, crashed: Path) -> None:
    dashboard.until("events")
    stream = dashboard.follow()
    first = next(value for topic, value in stream if topic == "events")
    assert first == {"first": 0, "items": first["items"], "whole": True}
    with open(crashed / "events.jsonl", "a") as log:
        log.write("\n")  # ends the half line
    write_event(crashed, "slow", "worker 0 is slow", 20.0, worker=0, id="1.5")
    grown = next(value for topic, value in stream if topic == "events")
    assert grown["first"] == 4
    assert grown["items"] == [
        {"time": BEGAN + 20, "kind": "slow", "text": "worker 0 is slow", "worker": 0, "id": "1.5"}
    ]
    troubles = next(value for topic, value in stream if topic == "troubles")
    assert [each["kind"] for each in troubles] == ["lost", "slow"]
    stream.close()


def test_a_full_queue_is_told_and_followed_by_the_whole_state() -> None:
    async def follow() -> None:
        feed = Feed(queue_max=3)
        feed.publish("step", 0)
        stream = feed.follow()
        assert [await anext_of(stream) for _ in range(2)][1] == "event: step\ndata: 0\n\n"
        for step in range(1, 10):
            feed.publish("step", step)
        feed.append("events", ["a", "b"])
        assert await anext_of(stream) == 'event: dropped\ndata: {"count": 10}\n\n'
        assert await anext_of(stream) == "event: step\ndata: 9\n\n"
        assert json.loads((await anext_of(stream)).partition("data: ")[2])["items"] == ["a", "b"]
        feed.publish("step", 10)
        assert await anext_of(stream) == "event: step\ndata: 10\n\n"
        await stream.aclose()
        feed.publish("step", 11)

    async def anext_of(stream: Any) -> str:
        return str(await asyncio.wait_for(stream.__anext__(), LIMIT_S))

    asyncio.run(follow())


def test_a_queue_that_is_not_full_drops_nothing() -> None:
    async def take() -> list[str]:
        client = Client(Feed(), 3)
        for text in "abc":
            client.put(text)
        return await client.take()

    assert asyncio.run(take()) == ["a", "b", "c"]


def test_an_order_needs_the_pages_origin_and_a_confirmation(dashboard: Dashboard) -> None:
    order = {"order": "drain", "node": "node0"}
    sentence = "Orders are taken only from the dashboard's own page.\n"
    for path in ("/api/orders", "/api/orders/confirm"):
        for origin in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
            answer = dashboard.ask(path, order, cookie=dashboard.cookie, **origin)
            assert answer[:2] == (403, sentence)
        assert dashboard.ask(path, order, origin=dashboard.origin)[0] == 403
        assert dashboard.ask(path, cookie=dashboard.cookie)[0] == 405
    found = dashboard.order("/api/orders/confirm", {"confirm": "made up"})
    assert found["problem"].startswith("no order waits for this confirmation")
    assert "coordinator.json does not exist" in dashboard.order("/api/orders", order)["problem"]
    for bad in ({}, {"order": "reboot"}, {"order": "drain", "node": 7}, {**order, "more": 1}):
        assert dashboard.order("/api/orders", bad)["problem"].startswith("the order cannot be read")
    assert dashboard.order("/api/orders", "x" * 5000)["problem"] == "The order is too long."


def test_the_end_of_a_workers_log(dashboard: Dashboard, crashed: Path) -> None:
    found = json.loads(dashboard.ask("/api/log?worker=1", cookie=dashboard.cookie)[1])
    assert found["name"] == "worker-1-1.log"
    assert found["lines"] == [f"line {number}" for number in range(100, 300)]
    (crashed / "logs" / "worker-1-10.log").write_text("newer\n")
    (crashed / "logs" / "worker-1-9.log").write_text("older\n")
    assert read_log_end(crashed / "logs", 1) == ("worker-1-10.log", ["newer"])
    (crashed / "logs" / "worker-1-10.log").write_text("x" * 50_000 + "\nend\n")
    assert read_log_end(crashed / "logs", 1)[1] == ["end"]
    assert read_log_end(crashed / "logs", 7) == ("", [])
    for bad in ("..", "", "-1", "1/../2"):
        assert dashboard.ask(f"/api/log?worker={bad}", cookie=dashboard.cookie)[0] == 400


def test_the_use_of_a_node_is_shown_and_no_other_file(dashboard: Dashboard) -> None:
    dashboard.until("machines")
    status, text, _ = dashboard.ask("/api/usage?node=near", cookie=dashboard.cookie)
    found = json.loads(text)
    assert (status, found["cores"]) == (200, 2)
    assert found["curves"]["network"]["sent"][0] == [BEGAN + 2.5, 3e6]
    assert [*found["curves"]["memory"]] == ["node", "worker 0", "worker 1"]
    for name in ("far", "../usage/near", "near.jsonl", ""):
        assert dashboard.ask(f"/api/usage?node={name}", cookie=dashboard.cookie)[0] == 404


def test_paths_outside_of_the_page_are_not_served(dashboard: Dashboard) -> None:
    for path in ("/static/../site.py", "/static/%2e%2e/site.py", "/static/", "/secret"):
        assert dashboard.ask(path, cookie=dashboard.cookie)[0] in (404, 405)


def test_a_tail_follows_a_file_that_grows_and_one_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = FileTail(path)
    assert list(tail.read()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.read()) == [b"one"]
    with open(path, "ab") as log:
        log.write(b"o\n" + b"x" * (3 << 20) + b"\nthree\n")
    assert list(tail.read())[0::2][0] == b"two"
    assert not tail.cut
    path.write_bytes(b"new\n")
    assert list(tail.read()) == [b"new"]
    assert tail.cut
    path.unlink()
    os.mkfifo(path)
    assert list(tail.read()) == []


def test_losses_that_were_withdrawn_are_forgotten(crashed: Path) -> None:
    series = LossSeries(crashed)
    assert series.refresh()
    assert series.newest() == (19, 19.5)
    assert not series.refresh()
    writer = LedgerWriter(ledger_path(crashed, 0, 1))
    writer.doubt(DoubtLine(step=12, view=1, again=True))
    writer.close()
    assert series.refresh()
    assert series.newest() == (11, 11.5)
    again = LossSeries(crashed)
    assert again.refresh()
    assert again.points() == series.points()


def test_time_that_no_worker_tells_of_has_no_rate() -> None:
    each = ProcessTimes(worker=0, incarnation=1, began=BEGAN)
    each.lines = [
        SpentLine(4, {TimeUse.TASK: 2.0}, {1: 4}),
        SpentLine(4, {TimeUse.STALL: 1.0}),
    ]
    late = ProcessTimes(worker=1, incarnation=1, began=BEGAN + 5)
    late.lines = [SpentLine(10, {TimeUse.TASK: 1.0}, {1: 6})]
    points = measure_rates([each, late])
    assert [x for x, _ in points] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    rates = [rate for _, rate in points]
    assert rates[3:5] == [None, None]
    assert [*rates[:3], rates[5]] == pytest.approx([2.0, 2.0, 0.0, 6.0], abs=1e-5)
    assert rate_now([each, late]) == pytest.approx(6 / 6)  # the worker with most steps counts
    assert measure_rates([]) == []
    assert rate_now([ProcessTimes(0, 1, BEGAN)]) is None


def test_a_directory_without_a_run_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["dashboard", str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"holdfast: there is no run directory {missing}: `holdfast run` prints its own at start\n"
    )
    assert main(["dashboard", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_dashboard_without_its_packages_says_what_to_install(
    crashed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_command, "NEEDS", ("starlette", "no_such_package"))
    assert main(["dashboard", str(crashed)]) == 2
    assert capsys.readouterr().err == (
        "holdfast: the dashboard needs no_such_package: pip install 'holdfast[dashboard]'\n"
    )


def test_an_address_that_is_taken_or_foreign_is_named(
    dashboard: Dashboard, crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(crashed), "--port", str(dashboard.port)]) == 2
    assert f"cannot listen on 127.0.0.1:{dashboard.port}" in capsys.readouterr().err
    assert main(["dashboard", str(crashed), "--host", "192.0.2.1"]) == 2
    assert "cannot listen on 192.0.2.1:0" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_url_and_ends_when_asked(
    crashed: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    command = [sys.executable, "-m", "holdfast.cli.main", "dashboard", str(crashed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        url = it.stdout.readline().removeprefix("dashboard: ").strip()
        with urlopen(url, timeout=LIMIT_S) as answer:
            assert b"<title>Holdfast</title>" in answer.read()
        it.send_signal(number)
        _, errors = it.communicate(timeout=LIMIT_S)
        assert it.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
        assert errors == ""
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_a_live_run_is_shown_and_a_node_is_drained(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = ("--steps", "40", "--task-s", "0.01", "--hold", "5", str(go))
    options = ("--virtual", "4", "--nodes-min", "2", "--dashboard")
    with (
        start(*words, nproc=1, options=options) as run,
        LocalNodes(run) as others,
    ):
        run.until(run.run_dir.coordinator.exists, LIMIT_S, "the coordinator listens")
        others.add("far")
        run.until_members(2)
        printed = run.until(lambda: URL.search(run.log()), LIMIT_S, "the URL is printed")
        with urlopen(printed[1], timeout=LIMIT_S) as answer:
            assert b"<title>Holdfast</title>" in answer.read()
        with Dashboard(run.run_dir.path) as dashboard:
            status = next(v for topic, v in dashboard.follow() if topic == "status" and v)
            assert [node["id"] for node in status["nodes"]] == ["far", "node0"]
            assert {row[1] for row in status["workers"]} == {"far", "node0"}
            order = {"order": "drain", "node": "far"}
            unknown = dashboard.order("/api/orders", {**order, "node": "fra"})
            assert unknown == {
                "problem": "there is no node 'fra' in the job; its nodes: far, node0"
            }
            move = {"order": "migrate", "worker": 0, "to": "nowhere"}
            refused = dashboard.order("/api/orders", move)["problem"]
            assert refused.startswith("there is no node 'nowhere' in the job")
            asked = dashboard.order("/api/orders", order)
            assert asked["question"].startswith("Drain node far with 1 worker in the job?")
            confirm = {"confirm": asked["confirm"]}
            assert dashboard.order("/api/orders/confirm", confirm) == {"id": 1}
            assert "problem" in dashboard.order("/api/orders/confirm", confirm)  # once only
            go.touch()
            told = next(
                value[0]
                for topic, value in dashboard.follow()
                if topic == "orders" and value[0]["state"] != "waiting"
            )
            assert (told["text"], told["state"]) == ("drain far", "done")
            assert told["answer"] == "far has left the job"
        finish(run)
    (event,) = run.events("drain")
    assert "node far is left (drained by the operator)" in event["text"]
