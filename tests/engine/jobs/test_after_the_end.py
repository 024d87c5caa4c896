"""Nodes that were silent when their job ended, or were about to join, learn of the end at once.

Each of these agents would otherwise wait for a coordinator for --abandon-s, which is 300 s here.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from conftest import RUN_S, Start
from holdfast.engine.runtime.local_run import LocalRun, strike

OPTIONS = ("--nodes-max", "2", "--lease-s", "1")


def further_node(run: LocalRun, folder: Path) -> LocalRun:
    run.until(run.run_dir.coordinator.exists, RUN_S, "an address")
    host, port = run.run_dir.address()
    secret = ("--secret-file", str(run.run_dir.path / "secret"))
    words = ("agent", "--join", f"{host}:{port}", "--name", "node1", "--run-dir", str(folder))
    return LocalRun(folder, (), (), command=(*words, *secret))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_an_agent_that_was_frozen_at_the_end_ends_as_it_wakes(
    start: Start, tmp_path: Path, shared: bool
) -> None:
    go = tmp_path / "go"
    options = (*OPTIONS, "--nodes-min", "2")
    with start("--steps", "12", "--hold", "5", str(go), nproc=1, options=options) as run:
        folder = run.run_dir.path if shared else tmp_path / "node1"
        with further_node(run, folder) as node:
            run.until_members(2)
            (agent,) = [a["pid"] for a in run.status()["agents"] if a["id"] == "node1"]
            strike(agent, signal.SIGSTOP)
            try:
                go.touch()
                assert run.wait(RUN_S) == 0, run.log()
            finally:
                strike(agent, signal.SIGCONT)
            assert node.wait(RUN_S) == 0, node.log()
            assert node.leftovers() == []


@pytest.mark.slow
def test_a_node_that_has_just_asked_what_the_job_is_is_told_that_it_is_over(
    start: Start, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with start("--steps", "12", "--hold", "11", str(go), nproc=1, options=OPTIONS) as run:
        run.until_members(1)
        with further_node(run, tmp_path / "node1") as node:
            node.until(lambda: "joins" in "".join(node.err), RUN_S, "it has asked")
            go.touch()
            assert run.wait(RUN_S) == 0, run.log()
            assert node.wait(RUN_S) == 0, node.log()
