"""Nodes that are asked to leave a job, in jobs of two nodes whose control plane is encrypted."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates
from conftest import RUN_S, finish
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike
from places import TESTS

HOST = "127.0.0.1"
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
SCRIPT = TESTS / "scripts" / "trainer.py"
STEPS = 60
HELD = 3  # after this step the job waits until it is let go


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"), HOST)


def holdfast(run: LocalRun, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the run's certificates and directory."""
    more = ("--tls", str(run.tls), "--run-dir", str(run.run_dir.path))
    return subprocess.run(
        [*HOLDFAST, *args, *more], capture_output=True, text=True, check=False, timeout=RUN_S
    )


@contextlib.contextmanager
def node(run: LocalRun, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start one more node of the job, on this machine."""
    host, port = run.run_dir.address()
    with open(f"{run.run_dir.path}-{name}", "wb") as output:
        popen = subprocess.Popen(
            [
                *(*HOLDFAST, "agent", "--join", f"{host}:{port}", "--name", name),
                *("--tls", str(run.tls), "--run-dir", str(run.run_dir.path)),
                *("--domain", f"rack={name}"),
            ],
            stdout=output,
            stderr=output,
        )
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


@pytest.fixture
def run(tmp_path: Path, certificates: Path) -> Iterator[LocalRun]:
    """A job that begins with two nodes, and is held early on until `let_go`."""
    options = ["--nproc", "1", "--virtual", "4", "--nodes-min", "2", "--domain", "rack=first"]
    words = [str(SCRIPT), "--steps", str(STEPS), "--hold", str(HELD), str(tmp_path / "go")]
    with LocalRun(tmp_path / "run", options, words, tls=certificates) as made:
        made.until(made.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        yield made


def let_go(run: LocalRun) -> None:
    (run.run_dir.path.parent / "go").touch()


def drain(run: LocalRun, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Drain a node of a held job, which is let go once the order is known."""
    with ThreadPoolExecutor() as pool:
        drained = pool.submit(holdfast, run, "drain", name, *options)
        run.until(lambda: draining(run, name) or drained.done(), RUN_S, "the order")
        let_go(run)
        return drained.result(RUN_S)


def draining(run: LocalRun, name: str) -> bool:
    return any(a["draining"] for a in run.status()["agents"] if a["id"] == name)


def domains(run: LocalRun) -> dict[str, list[str]]:
    return {agent["id"]: agent["domains"] for agent in run.status()["agents"]}


def test_a_drained_node_leaves_and_the_job_goes_on(
    run: LocalRun, reference: Callable[[int], str]
) -> None:
    with node(run, "far") as far:
        run.until_members(2)
        assert domains(run) == {"far": ["rack=far"], "node0": ["rack=first"]}
        unknown = holdfast(run, "drain", "fra")
        assert unknown.returncode == 2
        assert "no node 'fra'" in unknown.stderr
        assert "far, node0" in unknown.stderr
        drained = drain(run, "far", "--reason", "a new fan")
        assert drained.returncode == 0, drained.stderr
        assert members(run) in ({"node0": 1}, {})  # or the job has just ended
        assert far.wait(RUN_S) == 0
        assert finish(run) == reference(STEPS)
    (event,) = run.events("drain")
    assert "node far is left (a new fan)" in event["text"]
    assert run.events("lost") == []


@pytest.mark.slow
def test_the_first_node_can_be_drained_while_its_coordinator_stays(
    run: LocalRun, reference: Callable[[int], str]
) -> None:
    with node(run, "far") as far:
        run.until_members(2)
        drained = drain(run, "node0")
        assert drained.returncode == 0, drained.stderr
        assert far.wait(RUN_S) == 0
        assert finish(run) == ""  # the leader prints, and it is on the other node
    assert run.events("lost") == []
    printed = Path(f"{run.run_dir.path}-far").read_text().splitlines()
    assert reference(STEPS) in printed


@pytest.mark.slow
def test_a_drain_outlasts_the_coordinator_and_ends_with_the_job(
    tmp_path: Path, certificates: Path, reference: Callable[[int], str]
) -> None:
    """No node can take the only node's work, so the order waits for as long as the job lasts."""
    words = [str(SCRIPT), "--steps", str(STEPS), "--hold", str(HELD), str(tmp_path / "go")]
    options = ["--nproc", "1", "--virtual", "4"]
    with LocalRun(tmp_path / "run", options, words, tls=certificates) as run:
        run.until_members(1)
        with ThreadPoolExecutor() as pool:
            drained = pool.submit(holdfast, run, "drain", "node0")
            run.until(lambda: draining(run, "node0"), RUN_S, "the order")
            old = run.status()["coordinator"]["pid"]
            strike(old)
            run.until(lambda: another(run, old), RUN_S, "another coordinator")
            let_go(run)
            assert drained.result(RUN_S).returncode == 0, drained.result().stderr
        assert finish(run) == reference(STEPS)


def another(run: LocalRun, old: int) -> bool:
    with contextlib.suppress(HoldfastError):
        return bool(run.status()["coordinator"]["pid"] != old)
    return False


def members(run: LocalRun) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return {a["id"]: a["members"] for a in run.status()["agents"] if a["members"]}
    return {}


@pytest.mark.slow
def test_without_certificates_nobody_gets_in(run: LocalRun) -> None:
    found = subprocess.run(
        [*HOLDFAST, "status", "--run-dir", str(run.run_dir.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert found.returncode == 2
    assert "if it wants TLS, this side needs certificates" in found.stderr
    assert "Traceback" not in found.stderr
