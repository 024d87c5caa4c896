"""Ends of workers' logs, read from the nodes where the workers are."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import RUN_S, Start
from holdfast.engine.core.types import WorkerId
from holdfast.engine.runtime.contact import read_worker_log
from holdfast.engine.runtime.coordinate import connected_nodes
from holdfast.engine.runtime.coordinate.connected_nodes import LogDesk
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire.messages import LogReply, LogRequest


class Node:
    """Stands for the way to a node, which answers with lines, with none, or not at all."""

    def __init__(self, desk: LogDesk, answer: LogReply | None) -> None:
        self._desk, self._answer = desk, answer
        self.asked: list[LogRequest] = []

    def send(self, message: LogRequest) -> None:
        self.asked.append(message)
        if self._answer is not None:
            number, told = message.number, self._answer
            self._desk.take(LogReply(number=number, name=told.name, lines=told.lines))


def find(logs: Path, answer: LogReply | None, numbers: tuple[int, ...] = (3,)) -> list[LogReply]:
    """Return the lines that a desk finds of worker 7 in the folder `logs`, for parallel askers."""

    async def ask() -> list[LogReply]:
        desk = LogDesk(logs)
        node: Any = Node(desk, answer)
        questions = [LogRequest(worker=WorkerId(7), number=number) for number in numbers]
        found = await asyncio.gather(*(desk.find(each, node) for each in questions))
        assert [each.worker for each in node.asked] == [7] * len(numbers)
        assert len({each.number for each in node.asked}) == len(numbers)
        desk.take(LogReply(number=1, name="late", lines=()))
        return found

    return asyncio.run(ask())


def test_the_nodes_answer_counts_more_than_a_file_of_the_coordinators(tmp_path: Path) -> None:
    (tmp_path / "worker-7-1.log").write_text("of old\n")
    told = LogReply(number=0, name="worker-7-2.log", lines=("of now",))
    found = find(tmp_path, told, numbers=(3, 4))
    assert [(each.number, each.name, each.lines) for each in found] == [
        (3, "worker-7-2.log", ("of now",)),
        (4, "worker-7-2.log", ("of now",)),
    ]


@pytest.mark.parametrize("answer", [None, LogReply(number=0, name="", lines=())])
def test_without_an_answer_the_file_of_the_coordinators_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: LogReply | None
) -> None:
    monkeypatch.setattr(connected_nodes, "NODE_S", 0.01)
    assert find(tmp_path, answer) == [LogReply(number=3, name="", lines=())]
    (tmp_path / "worker-7-1.log").write_text("of old\n")
    assert find(tmp_path, answer) == [LogReply(number=3, name="worker-7-1.log", lines=("of old",))]


@pytest.mark.slow
def test_logs_of_a_node_with_its_own_run_directory(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    options = ("--nodes-min", "2", "--nodes-max", "2")
    with start("--steps", "12", "--hold", "5", str(go), nproc=1, options=options) as run:
        run.until(run.run_dir.coordinator.exists, RUN_S, "an address")
        host, port = run.run_dir.address()
        secret = ("--secret-file", str(run.run_dir.secret_file))
        own = tmp_path / "own"
        words = ("agent", "--join", f"{host}:{port}", "--name", "node1", "--run-dir", str(own))
        with LocalRun(own, (), (), command=(*words, *secret)) as node:
            run.until_members(2)
            (far,) = [w["id"] for w in run.status()["workers"] if w["agent"] == "node1"]
            assert not list(run.run_dir.logs.glob(f"worker-{far}-*.log"))
            viewer = tmp_path / "viewer"  # as a dashboard by an address has it
            viewer.mkdir()
            for path in (run.run_dir.job, run.run_dir.coordinator, run.run_dir.secret_file):
                shutil.copy(path, viewer)
            for worker, logs in ((far, own / "logs"), (1 - far, run.run_dir.logs)):
                with open(logs / f"worker-{worker}-1.log", "a") as log:
                    log.write(f"a line of worker {worker}\n")
                name, lines = read_worker_log(RunDir(viewer), None, worker)
                assert name == f"worker-{worker}-1.log"
                assert f"a line of worker {worker}" in lines
            assert read_worker_log(RunDir(viewer), None, 99) == ("", [])
            go.touch()
            assert run.wait(RUN_S) == 0, run.log()
            assert node.wait(RUN_S) == 0, node.log()
    assert read_worker_log(run.run_dir, None, 1 - far)[0] == f"worker-{1 - far}-1.log"
