"""A whole job whose coordinators are elected in a real etcd: one is killed, another takes over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Start, finish
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike
from support import start_etcd

STEPS = 150
RUN_S = 60.0

pytestmark = pytest.mark.timeout(200)


@contextlib.contextmanager
def standby(url: str, run: LocalRun, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    secret = (run.run_dir.path / "secret").read_text()
    popen = subprocess.Popen(
        [
            *(sys.executable, "-m", "holdfast.cli.main", "coordinator", "--election", url),
            *("--run-dir", str(tmp_path / "standby"), "--host", "127.0.0.1"),
        ],
        env=os.environ | {"HOLDFAST_SECRET": secret},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert popen.stderr is not None
        for line in popen.stderr:
            if "is the leader" in line:
                break
        yield popen
    finally:
        popen.kill()
        popen.wait()


def until_newer(run: LocalRun, term: int) -> dict[str, Any]:
    """Return the coordinator of a later term, once it answers."""

    def newer() -> dict[str, Any] | None:
        with contextlib.suppress(HoldfastError):
            found: dict[str, Any] = run.status()["coordinator"]
            return found if found["term"] > term else None
        return None

    found: dict[str, Any] = run.until(newer, RUN_S, f"a coordinator of a term after {term}")
    return found


@pytest.mark.slow
def test_a_standby_takes_over(
    start: Start, reference: Callable[[int], str], tmp_path: Path
) -> None:
    """One is killed, the next frozen past its term: steps continue, changes need a successor."""
    with (
        start_etcd(tmp_path) as etcd,
        start(
            "--steps", str(STEPS), "--task-s", "0.03", options=("--election", etcd.url("x"))
        ) as run,
    ):
        run.until_members(4)
        with standby(etcd.url("x"), run, tmp_path):
            first = run.status()["coordinator"]
            members = run.members()
            strike(first["pid"])
            strike(members[max(members)])  # found lost as soon as there is a coordinator
            second = until_newer(run, first["term"])
            strike(second["pid"], signal.SIGSTOP)
            third = until_newer(run, second["term"])
            strike(second["pid"], signal.SIGCONT)
            assert len({first["pid"], second["pid"], third["pid"]}) == 3
            assert finish(run) == reference(STEPS)
