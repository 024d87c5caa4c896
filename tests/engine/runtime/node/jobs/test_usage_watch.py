"""Each node of a real job records its use and its workers', and the report draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RUN_S, Start
from holdfast.cli.main import main
from holdfast.engine.records.usage_lines import UsageLine, list_nodes, read_usage
from holdfast.engine.runtime.local_run import LocalRun
from labs.local_nodes import LocalNodes

pytestmark = pytest.mark.slow


def find_lines(run_dir: Path, node: str) -> list[UsageLine]:
    usage = read_usage(run_dir, node)
    return [] if usage is None else [line for line in usage.lines if line.workers]


def find_nodes(run: LocalRun) -> dict[str, int]:
    """Return the number of lines of each node that measure its workers."""
    path = run.run_dir.path
    return {name: len(find_lines(path, name)) for name in list_nodes(path)}


def test_nodes_record_their_use(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    words, options = ("--steps", "12", "--hold", "9", str(gate)), ("--nodes-min", "2")
    with start(*words, nproc=2, options=options) as run, LocalNodes(run) as others:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        others.add("far", "--nproc", "2")
        run.until(
            lambda: len(found := find_nodes(run)) == 2 and min(found.values()) >= 2,
            RUN_S,
            "two lines",
        )
        gate.touch()
        assert run.wait(RUN_S) == 0, run.log()  # the other node may still be about to end
    path = run.run_dir.path
    for name in list_nodes(path):
        lines = find_lines(path, name)
        assert max(len(line.workers) for line in lines) == 2
        assert all(use.memory_bytes > 1e7 for line in lines for use in line.workers.values())
        assert sum(use.cores for line in lines for use in line.workers.values()) > 0
    assert main(["report", str(path)]) == 0
    assert (path / "report.html").read_text().count("<title>worker ") >= 2 * 4
