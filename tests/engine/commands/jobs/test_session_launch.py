"""Jobs that a session starts, a notebook for instance: equal bits, and an end with their cell."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import RUN_S, SCRIPTS
from holdfast.engine.runtime.local_run import processes_that_name
from support import until

CELLS = '''
import hashlib
import time
from dataclasses import dataclass

import torch
from torch import nn

import holdfast
# %%
WIDTHS = (16, 8)


@dataclass
class Settings:
    rate: float = 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Dropout(0.1), nn.Linear(width, 1))
            for width in WIDTHS
        )

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)
# %%
def digest(model):
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def train(steps, hold=-1):
    """Is a job's work."""
    job = holdfast.join()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=Settings().rate)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(until=steps):
        for _ in step:
            x = torch.randn(4, 6)
            step.backward((model(x).squeeze(1) - x.sin().sum(1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step.index == hold:
            print("holding", flush=True)
            time.sleep(3600)
    if job.is_leader:
        print("digest", digest(model))
'''
ALONE = 'holdfast.launch(train, {"steps": 8}, nproc=1, virtual=4)'
KILLED = """holdfast.launch(
    train, {"steps": 8}, nproc=2, virtual=4, faults="faults.txt", run_dir="run"
)"""
AGAIN = 'holdfast.launch(train, {"steps": -1}, nproc=1, run_dir="run")'
FAILING = 'holdfast.launch(train, {"steps": "many"}, nproc=1)'
HELD = 'holdfast.launch(train, {"steps": 8, "hold": 2}, nproc=2, run_dir="held")'
RunCells = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_cells(tmp_path: Path) -> Iterator[RunCells]:
    """Return run_cells(*cells): a process that runs these cells after CELLS."""
    with contextlib.ExitStack() as stack:

        def run(*cells: str) -> subprocess.Popen[str]:
            (tmp_path / "cells.py").write_text("\n# %%\n".join([CELLS, *cells]))
            session = subprocess.Popen(
                [sys.executable, str(SCRIPTS / "session.py"), "cells.py"],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(session)
            stack.callback(session.kill)
            return session

        yield run


def read_until(session: subprocess.Popen[str], word: str) -> list[str]:
    """Return the lines of output up to one with this word."""
    assert session.stdout is not None
    lines = []
    for line in session.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_a_job_of_a_session_has_the_same_bits_after_a_kill(
    run_cells: RunCells, tmp_path: Path
) -> None:
    (tmp_path / "faults.txt").write_text("worker 1 step 3 kill\n")
    session = run_cells(ALONE, KILLED, AGAIN, FAILING, 'print("last cell")')
    output, _ = session.communicate(timeout=2.5 * RUN_S)
    first, second = re.findall("^digest ([0-9a-f]{64})$", output, re.MULTILINE)
    assert first == second
    assert "worker 1 was lost: ended by SIGKILL" in output
    assert "run_dir='run' already holds a run: name another folder" in output
    assert re.search("UserError: the job in holdfast-runs/.* ended with status 1: ", output)
    assert output.endswith("last cell\n")


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_a_job_of_a_session_ends_with_its_cell(
    run_cells: RunCells, tmp_path: Path, end: str
) -> None:
    session = run_cells(HELD, 'print("last cell")')
    read_until(session, "holding")
    assert processes_that_name(tmp_path / "held")
    if end == "kill":
        session.kill()
        until(lambda: not processes_that_name(tmp_path / "held"), "the end of all processes")
        return
    session.send_signal(signal.SIGINT)
    lines = read_until(session, "last cell")
    assert processes_that_name(tmp_path / "held") == []
    assert any(line.startswith("KeyboardInterrupt") for line in lines)
    assert session.wait(RUN_S) == 0


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
def test_a_notebook_runs_jobs_and_ends_them(tmp_path: Path) -> None:
    """In a kernel of Jupyter: it is interrupted in one cell, and killed in another one."""
    reason = "Jupyter's kernel is not installed (pip install ipykernel)"
    pytest.importorskip("ipykernel", reason=reason)
    manager, client = pytest.importorskip("jupyter_client", reason=reason).manager.start_new_kernel(
        cwd=str(tmp_path)
    )
    printed: list[str] = []

    def show(message: dict[str, Any]) -> None:
        printed.append(message["content"].get("text", ""))

    def execute(cell: str) -> dict[str, Any]:
        reply = client.execute_interactive(cell, output_hook=show, timeout=RUN_S)
        return dict(reply["content"])

    try:
        (tmp_path / "faults.txt").write_text("worker 1 step 3 kill\n")
        for cell in CELLS.replace("def digest", "%time 1 + 1\n\n\ndef digest").split("# %%\n"):
            assert execute(cell)["status"] == "ok", printed
        for cell in (ALONE, KILLED):
            assert execute(cell)["status"] == "ok", printed
        first, second = re.findall("^digest ([0-9a-f]{64})$", "".join(printed), re.MULTILINE)
        assert first == second
        assert execute(AGAIN)["ename"] == "UserError"
        with ThreadPoolExecutor(1) as other:
            reply = other.submit(execute, HELD)
            until(lambda: "holding" in "".join(printed), "the step")
            manager.interrupt_kernel()
            assert reply.result(RUN_S)["ename"] == "KeyboardInterrupt"
        assert processes_that_name(tmp_path / "held") == []
        client.execute(HELD.replace("held", "killed"))
        logs = tmp_path / "killed" / "logs"
        until(
            lambda: any("holding" in each.read_text() for each in logs.glob("worker-*")),
            "the step",
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    until(lambda: not processes_that_name(tmp_path / "killed"), "the end of all processes")
