"""The processes around training: busy is not frozen, what dies comes back, status answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, Start, finish
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.engine.host.lifetime import sample_process
from holdfast.engine.runtime.local_run import strike

STEPS = 60
Reference = Callable[[int], str]


@pytest.mark.slow
@pytest.mark.parametrize("how", "gil compute wait first evaluate before".split())
def test_a_busy_worker_is_left_alone(how: str, start: Start) -> None:
    seconds = FreezePolicy().sample_s * FreezePolicy().silent_samples * 2
    with start(how, str(seconds), nproc=2, script="busy.py") as run:
        assert finish(run) == "done"
    assert run.events("lost") == []


@pytest.mark.slow
def test_a_worker_that_holds_the_interpreter_for_20_s_is_left_alone(start: Start) -> None:
    with start("gil", "20", nproc=2, script="busy.py") as run:
        assert finish(run) == "done"
    assert run.events("lost") == []


def test_the_freeze_detector_on_a_real_process() -> None:
    script = "import time\nwhile True: time.sleep(0.005)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            policy = FreezePolicy()
            detector = FreezeDetector(policy)
            _until_state(process.pid, "S")
            assert not any(_looks(detector, process.pid, policy.silent_samples * 2))
            process.send_signal(19)
            _until_state(process.pid, "T")
            reasons = _looks(detector, process.pid, policy.stopped_samples)
            assert "stopped" in str(reasons[-1])
            assert reasons[:-1] == [None] * (policy.stopped_samples - 1)
        finally:
            process.kill()
    assert sample_process(process.pid) is None


def _until_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + RUN_S
    while (sample := sample_process(pid)) is None or sample.state != state:
        assert time.monotonic() < deadline


def _looks(detector: FreezeDetector, pid: int, count: int) -> list[str | None]:
    """`count` looks, each after the sleeper has had time to wake."""
    found = []
    for _ in range(count):
        ended = time.monotonic() + 0.03
        while time.monotonic() < ended:
            pass
        sample = sample_process(pid)
        assert sample is not None
        found.append(detector.observe(sample))
    return found


def test_the_coordinator_dies_and_nothing_is_lost(start: Start, reference: Reference) -> None:
    with start("--steps", str(STEPS), "--task-s", "0.03", nproc=2) as run:
        run.until_members(2)
        before = run.status()
        strike(before["coordinator"]["pid"])

        def back() -> bool:
            return bool(run.members()) and run.status()["coordinator"]["term"] == 2

        run.until(back, RUN_S, "a new coordinator")
        assert run.status()["view"] == before["view"], "its death changes no view"
        assert finish(run) == reference(STEPS)
    assert run.events("lost") == []


@pytest.mark.slow
def test_a_worker_dies_while_there_is_no_coordinator(start: Start, reference: Reference) -> None:
    with start("--steps", str(STEPS), "--task-s", "0.03", nproc=3) as run:
        members = run.until_members(3)
        strike(run.status()["coordinator"]["pid"])
        strike(members[1])
        assert finish(run) == reference(STEPS)
    assert [e["worker"] for e in run.events("lost")] == [1]


@pytest.mark.slow
def test_the_agent_dies_and_the_job_starts_again(start: Start, reference: Reference) -> None:
    with start("--steps", str(STEPS), "--task-s", "0.03", nproc=2) as run:
        run.until_members(2)
        (agent,) = run.status()["agents"]
        strike(agent["pid"])
        assert finish(run) == reference(STEPS)
    assert any("every worker was lost" in e["text"] for e in run.events("view"))


@pytest.mark.slow
def test_status_answers_in_the_middle_of_a_recovery(start: Start) -> None:
    with start("--steps", "400", "--task-s", "0.03", nproc=3) as run:
        members = run.until_members(3)
        strike(members[2], 19)  # frozen: the other workers wait until it is fenced
        waits = []
        while not run.events("lost"):
            began = time.monotonic()
            status = run.status()
            waits.append(time.monotonic() - began)
            assert status["view"] in (1, 2)
        assert max(waits) < 1.0
        keys = {"view", "step", "coordinator", "agents", "workers"}
        assert keys <= status.keys()
        worker = status["workers"][0]
        assert {"id", "pid", "incarnation", "state", "virtual_ranks"} <= worker.keys()
        command = [sys.executable, "-m", "holdfast.cli.main", "status", "--json"]
        text = subprocess.run(
            [*command, "--run-dir", str(run.run_dir.path)],
            check=True,
            capture_output=True,
            timeout=RUN_S,
        ).stdout
        assert json.loads(text)["coordinator"]["pid"] == status["coordinator"]["pid"]


def test_strangers_are_refused_with_one_line(start: Start) -> None:
    with start("--steps", "200", "--task-s", "0.03", nproc=1) as run:
        run.until_members(1)
        with socket.create_connection(run.run_dir.address()) as stranger:
            stranger.recv(1024)
            stranger.sendall(os.urandom(4096))
            run.until(lambda: run.events("refused"), RUN_S, "the refusal")
        assert len(run.events("refused")) == 1
        assert run.members(), "the job goes on"


def test_the_secret_is_the_owners_alone(start: Start) -> None:
    with start("--steps", "2", nproc=1) as run:
        finish(run)
        assert (run.run_dir.path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_script_runs_without_a_launcher(tmp_path: Path) -> None:
    script = [sys.executable, str(SCRIPTS / "trainer.py"), "--steps", "3"]
    found = subprocess.run(
        script,
        check=True,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert len(found.stdout.splitlines()[-1]) == 64
    assert list(tmp_path.iterdir()) == []
