"""A worker joins a group of many, and has no connection to most of them at first."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SCRIPTS, finish
from holdfast.engine.runtime.local_run import LocalRun, strike

WORKERS = 24  # more than the members that give a joiner its state
SCRIPT, STEPS = str(SCRIPTS / "paced.py"), "60"
JOIN_S = 200.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_of(folder: Path, workers: int) -> LocalRun:
    options = ["--nproc", str(workers), "--virtual", str(WORKERS)]
    return LocalRun(folder / "run", options, [SCRIPT, str(folder / "go"), STEPS])


def test_a_killed_worker_of_many_is_replaced(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for folder in (few, many):
        folder.mkdir()
    (few / "go").touch()
    with run_of(few, 2) as run:
        undisturbed = finish(run)
    with run_of(many, WORKERS) as run:
        before = run.until_members(WORKERS, JOIN_S)
        victim = min(before)
        strike(before[victim])

        def is_replaced() -> bool:
            now = run.members()
            return len(now) == WORKERS and now[victim] != before[victim]

        run.until(is_replaced, JOIN_S, f"another process of worker {victim}")
        step = run.status()["step"]
        run.until(lambda: run.status()["step"] > step, JOIN_S, "a step of all")
        (many / "go").touch()
        assert finish(run) == undisturbed
