"""Servers of tables on several nodes, with TLS, and while there is no coordinator."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_table_servers import Digest, digest, flags, paced, servers_of, until_replaced, until_step

from certificates import make_certificates
from conftest import RUN_S, Start, finish
from holdfast.engine.runtime.local_run import LocalRun, strike
from labs.lab import LabRun
from labs.network_lab import Lab
from places import TESTS

__all__ = ["digest"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HOST = "127.0.0.1"
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
SCRIPT = str(TESTS / "scripts" / "tables.py")
WORDS = [SCRIPT, "--steps", "80", "--task-s", "0.03"]
needs_networks = pytest.mark.skipif(bool(Lab.available()), reason=Lab.available() or "-")


def test_a_server_is_lost_in_a_job_with_tls(tmp_path: Path, digest: Digest) -> None:
    tls = make_certificates(tmp_path, HOST)
    options = ["--nproc", "2", "--virtual", "4", *flags(2, 2)]
    with LocalRun(tmp_path / "run", options, WORDS, tls=tls) as run:
        pids = servers_of(run, 2)
        until_step(run, 10)
        assert strike(pids[0])
        until_replaced(run, 0, pids)
        assert finish(run) == digest(80)


def test_servers_go_on_without_a_coordinator(start: Start, digest: Digest) -> None:
    run = paced(start, 80, 2, flags(3, 2))
    with run:
        pids = servers_of(run, 3)
        until_step(run, 10)
        strike(run.status()["coordinator"]["pid"])
        assert strike(pids[2])
        run.until(lambda: run.status()["coordinator"]["term"] == 2, RUN_S, "a new coordinator")
        until_replaced(run, 2, pids)
        assert finish(run) == digest(80)
    assert run.events("lost") == []


def nodes_of_servers(run: LocalRun) -> list[str]:
    return [server["agent"] for server in run.status()["servers"]]


def test_the_only_copy_of_rows_moves_from_a_drained_node(tmp_path: Path, digest: Digest) -> None:
    options = ["--nproc", "1", "--virtual", "4", "--nodes-min", "2", *flags(2, 1)]
    script = [SCRIPT, "--steps", "150", "--task-s", "0.03"]
    with LocalRun(tmp_path / "run", options, script) as run, further_node(run, "node1") as node:
        pids = servers_of(run, 2)
        (number,) = (s["number"] for s in run.status()["servers"] if s["agent"] == "node1")
        until_step(run, 30)  # more updates than any worker keeps
        drain = [*HOLDFAST, "drain", "node1", "--run-dir", str(run.run_dir.path)]
        subprocess.run(drain, check=True, timeout=RUN_S)
        until_replaced(run, number, pids)
        assert node.wait(RUN_S) == 0, "the node has gone"
        assert "node1" not in nodes_of_servers(run)
        assert finish(run) == digest(150)
    assert not run.events("tables"), "no row was lost"
    assert not run.events("back")
    assert [e["text"].partition(" from")[0] for e in run.events("server")] == [
        f"server {number} is copied",
        f"server {number} moves",
    ]


@contextlib.contextmanager
def further_node(run: LocalRun, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one more node of the job, on this machine."""
    run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
    host, port = run.run_dir.address()
    words = ["agent", "--join", f"{host}:{port}", "--name", name]
    with open(f"{run.run_dir.path}-{name}", "wb") as output:
        command = [*HOLDFAST, *words, "--run-dir", str(run.run_dir.path)]
        popen = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


@needs_networks
@pytest.mark.parametrize("how", ["drained", "cut off"])
def test_the_servers_of_a_node_move_to_others(how: str, tmp_path: Path, digest: Digest) -> None:
    options = ["--virtual", "4", *flags(3, 2), "--abandon-s", "5"]
    with Lab(3) as lab, LabRun(lab, tmp_path / "run", options, WORDS) as run:
        run.until_members(3)
        servers_of(run, 3)
        assert sorted(nodes_of_servers(run)) == ["node0", "node1", "node2"]
        until_step(run, 10)
        if how == "drained":
            command = ["drain", "node2", "--run-dir", str(run.run_dir.path)]
            lab.hosts[0].popen([sys.executable, "-m", "holdfast.cli.main", *command]).wait(RUN_S)
        else:
            lab.cut(lab.hosts[2])
        run.until(lambda: "node2" not in nodes_of_servers(run), RUN_S, "its server moves")
        assert run.wait(RUN_S) == 0, run.log()
        assert run.last_lines() == {digest(80)}
    told = [e["text"].split(" from")[0] for e in run.events("server")]
    assert told == [*["server 2 is copied"][: how == "drained"], "server 2 moves"]
