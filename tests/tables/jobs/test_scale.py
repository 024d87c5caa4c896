"""`holdfast scale`: another number of servers holds the tables while the job trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_table_servers import (
    Digest,
    digest,
    flags,
    paced,
    saving,
    servers_of,
    until_saved,
    until_step,
)

from conftest import Start, finish
from holdfast.cli.main import main
from holdfast.engine.runtime import contact
from holdfast.engine.runtime.local_run import LocalRun, strike

__all__ = ["digest"]  # a fixture
LONG = 120


def scale(run: LocalRun, servers: int) -> int:
    return main(["scale", str(run.run_dir.path), "--servers", str(servers)])


def order(run: LocalRun, servers: int) -> None:
    """Ask for a number of servers, and do not wait until they have the rows."""
    contact.scale(run.run_dir, None, servers)


def lines(run: LocalRun) -> list[str]:
    return [event["text"] for event in run.events("server")]


@pytest.mark.slow
def test_tables_come_to_more_servers_and_to_fewer(start: Start, digest: Digest) -> None:
    run = paced(start, LONG, 2, flags(2))
    with run:
        servers_of(run, 2)
        until_step(run, 30)  # no worker keeps all updates until then
        assert scale(run, 3) == 0
        pids = servers_of(run, 3)
        assert scale(run, 1) == 0
        run.until(lambda: servers_of(run, 1) == {0: pids[0]}, 30, "the other servers end")
        assert run.status()["servers_held"] == run.status()["servers_wanted"] == 1
        assert finish(run) == digest(LONG)
    assert not run.events("tables"), "no row was lost"
    assert not run.events("back")
    assert lines(run) == [
        "the service goes from 2 servers to 3",
        "the service is on 3 servers now",
        "the service goes from 3 servers to 1",
        "the service is on 1 server now",
    ]


def until_placed(run: LocalRun, number: int) -> int:
    """Wait until a server listens; return its process id."""

    def find() -> int:
        found = {s["number"]: s["pid"] for s in run.status()["servers"]}
        return found.get(number, 0)

    pid: int = run.until(find, 30, f"server {number}")
    return pid


def strike_new_server(run: LocalRun) -> None:
    strike(until_placed(run, 3))


def strike_former_server(run: LocalRun) -> None:
    strike(servers_by_number(run)[0])


def strike_worker(run: LocalRun) -> None:
    strike(run.members()[1])


def strike_coordinator(run: LocalRun) -> None:
    strike(run.status()["coordinator"]["pid"])
    run.until(lambda: run.status()["coordinator"]["term"] == 2, 30, "a new coordinator")


def servers_by_number(run: LocalRun) -> dict[int, int]:
    return {s["number"]: s["pid"] for s in run.status()["servers"]}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(strike_new_server, marks=pytest.mark.slow),
        pytest.param(strike_worker, marks=pytest.mark.slow),
        pytest.param(strike_former_server, marks=pytest.mark.slow),
        pytest.param(strike_coordinator, marks=pytest.mark.slow),
    ],
)
def test_losses_while_tables_are_on_their_way_change_nothing(
    fault: Callable[[LocalRun], Any], start: Start, digest: Digest
) -> None:
    run = paced(start, LONG, 2, flags(3, 2))
    with run:
        servers_of(run, 3)
        until_step(run, 30)
        order(run, 5)
        fault(run)
        run.until(lambda: run.status()["servers_held"] == 5, 60, "all rows are on 5 servers")
        assert finish(run) == digest(LONG)
    assert not run.events("back")


@pytest.mark.slow
def test_an_order_is_taken_back(start: Start, digest: Digest) -> None:
    run = paced(start, LONG, 2, flags(2))
    with run:
        servers_of(run, 2)
        until_step(run, 30)
        order(run, 3)
        order(run, 2)
        assert scale(run, 2) == 0
        assert finish(run) == digest(LONG)
    assert lines(run)[0] == "the service goes from 2 servers to 3"
    assert lines(run)[-1] in ("the service stays on 2 servers", "the service is on 2 servers now")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("servers", [1, 4])
def test_stale_reads_of_any_keys_are_the_same_on_other_servers_and_after_a_checkpoint(
    servers: int, start: Start, tmp_path: Path
) -> None:
    late = ("--staleness", "8")
    with start("--keyed", "--steps", "90", script="tables.py", options=(*flags(1), *late)) as run:
        found = finish(run)
    run = paced(start, 90, 2, (*saving(tmp_path, 2), *late), "--keyed")
    with run:
        servers_of(run, 2)
        until_step(run, 30)
        assert scale(run, servers) == 0
        until_saved(tmp_path, run, 20 + run.status()["step"])
        for pid in (run.pid, *run.leftovers()):
            strike(pid)
    with LocalRun(run.run_dir.path, [], [], command=["resume", str(run.run_dir.path)]) as again:
        assert finish(again) == found
        assert "from the checkpoint of step" in again.events("view")[-1]["text"]
    assert not run.events("tables"), "no row was lost"


@pytest.mark.slow
def test_numbers_that_make_no_sense_are_refused(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with paced(start, LONG, 2, flags(2, 2)) as run:
        servers_of(run, 2)
        for servers, words in (
            (1, "--servers 1 is too few: each row is on 2 servers (--replicas)"),
            (0, "--servers 0 is too few"),
            (5000, "--servers 5000 is too many: ask for 1024 or fewer"),
        ):
            assert scale(run, servers) == 2
            assert words in capsys.readouterr().err
    with start(nproc=1, script="tables.py") as run:
        run.until_members(1)
        assert scale(run, 2) == 2
        assert "this job has no servers" in capsys.readouterr().err
    assert scale(run, 2) == 2, "the run is over"
    assert len(capsys.readouterr().err.splitlines()) == 1
