"""Workers of one rack host neighbouring virtual ranks, in a job of three real nodes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import RUN_S, finish
from holdfast.engine.records.ledger import find_ledger_files
from holdfast.engine.runtime.local_run import LocalRun
from places import TESTS

SCRIPT = TESTS / "scripts" / "trainer.py"
STEPS = 20


@contextlib.contextmanager
def start_node(run: LocalRun, name: str, rack: str) -> Iterator[None]:
    """Run one more node of the job on this machine, in a rack, once the job knows of it."""
    host, port = run.run_dir.address()
    words = ["agent", "--join", f"{host}:{port}", "--name", name, "--domain", f"rack={rack}"]
    command = [sys.executable, "-m", "holdfast.cli.main", *words]
    with open(f"{run.run_dir.path}-{name}", "wb") as output:
        node = subprocess.Popen(
            [*command, "--run-dir", str(run.run_dir.path)], stdout=output, stderr=output
        )
    try:
        run.until(lambda: any(agent["id"] == name for agent in run.status()["agents"]), RUN_S, name)
        yield
    finally:
        node.kill()
        node.wait()


def list_hosts(run: LocalRun) -> set[tuple[int, ...]]:
    """Return the workers that hosted the virtual ranks, in all steps of all ledgers."""
    lines = (
        json.loads(line)
        for path in find_ledger_files(run.run_dir.path)
        for line in path.read_text().splitlines()
    )
    return {tuple(w for w, _ in line["hosts"]) for line in lines if line["kind"] == "step"}


@pytest.mark.slow
def test_workers_of_one_rack_host_neighbours(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    """Worker 1 arrives between two workers of another rack. The result is the same."""
    options = ["--nproc", "1", "--virtual", "4", "--nodes-min", "3", "--domain", "rack=a"]
    options += ["--no-rebalance"]
    words = [str(SCRIPT), "--steps", str(STEPS)]
    with LocalRun(tmp_path / "run", options, words) as run:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        with start_node(run, "node1", "b"), start_node(run, "node2", "a"):
            assert finish(run) == reference(STEPS)
        assert list_hosts(run) == {(0, 2, 1, 1)}
