"""Jobs with a table of any keys: the same rows on any workers and servers, also after losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_table_servers import (
    flags,
    saving,
    servers_of,
    until_replaced,
    until_saved,
    until_step,
)

from conftest import SCRIPTS, Start, finish
from holdfast.engine.runtime.local_run import LocalRun, strike

STEPS = 60
PACE = ("--keyed", "--steps", str(STEPS), "--task-s", "0.03")


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the undisturbed run on one worker, which holds all rows itself."""
    path = tmp_path_factory.mktemp("keyed") / "run"
    words = [str(SCRIPTS / "tables.py"), "--keyed", "--steps", str(STEPS)]
    with LocalRun(path, ["--virtual", "4"], words) as run:
        return finish(run)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(2, flags(3, 2), marks=pytest.mark.slow),
        pytest.param(4, flags(1), marks=pytest.mark.slow),
        pytest.param(1, flags(2, 2), marks=pytest.mark.slow),
    ],
)
def test_the_result_does_not_depend_on_the_holders_of_rows(
    workers: int, options: tuple[str, ...], start: Start, expected: str
) -> None:
    words = ("--keyed", "--steps", str(STEPS))
    with start(*words, nproc=workers, script="tables.py", options=options) as run:
        assert finish(run) == expected


@pytest.mark.slow
def test_a_worker_that_holds_rows_comes_back(start: Start, expected: str) -> None:
    with start(*PACE, nproc=2, script="tables.py") as run:
        members = run.until_members(2)
        until_step(run, 10)
        assert strike(members[1])
        run.until(lambda: "join" in run.events("view")[-1]["text"], 60, "it joins again")
        assert finish(run) == expected


@pytest.mark.slow
def test_servers_and_workers_are_lost(start: Start, expected: str) -> None:
    with start(*PACE, nproc=2, script="tables.py", options=flags(3, 2)) as run:
        pids = servers_of(run, 3)
        until_step(run, 10)
        assert strike(pids[1])
        assert strike(run.members()[0])
        until_replaced(run, 1, pids)
        assert finish(run) == expected


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 3])
def test_a_job_whose_every_process_was_killed_goes_on(
    servers: int, start: Start, expected: str, tmp_path: Path
) -> None:
    options = saving(tmp_path, servers) if servers else saving(tmp_path, 0)[4:]
    with start(*PACE, nproc=2, script="tables.py", options=options) as run:
        until_saved(tmp_path, run, 20)
        for pid in (run.pid, *run.leftovers()):
            strike(pid)
    with LocalRun(run.run_dir.path, [], [], command=["resume", str(run.run_dir.path)]) as again:
        assert finish(again) == expected
    assert "from the checkpoint of step" in again.events("view")[-1]["text"]
