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
import trustme

from conftest import RUN_S, finish
from holdfast.testing.local_run import LocalRun, strike

HOST = "127.0.0.1"
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
STEPS = 60


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    leaf = authority.issue_cert(HOST)
    leaf.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    leaf.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    return folder


def holdfast(run: LocalRun, *args: str) -> subprocess.CompletedProcess[str]:
    """A command with the run's certificates and directory."""
    more = ("--tls", str(run.tls), "--run-dir", str(run.run_dir.path))
    return subprocess.run(
        [*HOLDFAST, *args, *more], capture_output=True, text=True, check=False, timeout=RUN_S
    )


@contextlib.contextmanager
def node(run: LocalRun, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more node of the job, on this machine."""
    host, port = run.run_dir.address()
    with open(f"{run.run_dir.path}-{name}", "wb") as output:
        popen = subprocess.Popen(
            [
                *(*HOLDFAST, "agent", "--join", f"{host}:{port}", "--name", name),
                *("--tls", str(run.tls), "--run-dir", str(run.run_dir.path)),
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
    """A job that begins with two nodes, and waits before its end until a node was drained."""
    options = ["--nproc", "1", "--virtual", "4", "--nodes-min", "2"]
    words = [str(SCRIPT), "--steps", str(STEPS), "--task-s", "0.02"]
    with LocalRun(tmp_path / "run", options, words, tls=certificates) as made:
        made.until(made.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        yield made


def test_a_drained_node_leaves_and_the_job_goes_on(
    run: LocalRun, reference: Callable[[int], str]
) -> None:
    with node(run, "far") as far:
        run.until_members(2)
        unknown = holdfast(run, "drain", "fra")
        assert unknown.returncode == 2
        assert "no node 'fra'" in unknown.stderr
        assert "far, node0" in unknown.stderr
        drained = holdfast(run, "drain", "far", "--reason", "a new fan")
        assert drained.returncode == 0, drained.stderr
        assert members(run) == {"node0": 1} or not run.running()
        assert far.wait(RUN_S) == 0
        assert finish(run) == reference(STEPS)
    (event,) = run.events("drain")
    assert "node far is left (a new fan)" in event["text"]
    assert run.events("lost") == []


def test_the_first_node_can_be_drained_while_its_coordinator_stays(
    run: LocalRun, reference: Callable[[int], str]
) -> None:
    with node(run, "far") as far:
        run.until_members(2)
        drained = holdfast(run, "drain", "node0")
        assert drained.returncode == 0, drained.stderr
        assert far.wait(RUN_S) == 0
        assert finish(run) == ""  # the leader prints, and it is on the other node
    assert run.events("lost") == []
    printed = Path(f"{run.run_dir.path}-far").read_text().splitlines()
    assert reference(STEPS) in printed


def test_a_drain_outlasts_the_coordinator_and_ends_with_the_job(
    tmp_path: Path, certificates: Path, reference: Callable[[int], str]
) -> None:
    """Nobody can take the only node's work, so the order waits for as long as the job lasts."""
    words = [str(SCRIPT), "--steps", str(STEPS), "--task-s", "0.03"]
    options = ["--nproc", "1", "--virtual", "4"]
    with LocalRun(tmp_path / "run", options, words, tls=certificates) as run:
        run.until_members(1)
        with ThreadPoolExecutor() as pool:
            drained = pool.submit(holdfast, run, "drain", "node0")
            run.until(lambda: run.status()["agents"][0]["draining"], RUN_S, "the order")
            strike(run.status()["coordinator"]["pid"])
            assert drained.result(RUN_S).returncode == 0, drained.result().stderr
        assert finish(run) == reference(STEPS)


def members(run: LocalRun) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return {a["id"]: a["members"] for a in run.status()["agents"] if a["members"]}
    return {}


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
