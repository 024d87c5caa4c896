"""The status line of `holdfast run` in a real pseudo-terminal, and the lines above it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import SCRIPTS
from holdfast.engine.runtime.rundir import RunDir

STATUS = re.compile(r"training: step \d+.*, [12] workers?")


def run_on_terminal(arguments: Sequence[str], run_dir: Path) -> tuple[int, str]:
    """Run `holdfast run` with a terminal as its output; return its status and the output."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--run-dir", str(run_dir)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        [*command, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 1 << 16):
                found += data
        os.close(ours)
        return process.wait(60), found.decode(errors="replace")


def whole_lines(output: str) -> list[str]:
    """Return the lines that stay, without colours and without the line that changes."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")]


SCRIPT = (str(SCRIPTS / "trainer.py"), "--steps", "40", "--task-s", "0.1")


@pytest.mark.slow
def test_a_terminal_has_a_status_line_below_all_other_lines(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--virtual", "2"]
    code, output = run_on_terminal([*options, *SCRIPT], tmp_path / "run")
    assert code == 0, output
    assert STATUS.search(output)
    assert re.search(r"about \d[^,]* left", output)
    lines = whole_lines(output)
    assert any(re.fullmatch("[0-9a-f]{64}", line) for line in lines)  # the script's own last line
    assert any(re.match(r"holdfast: view 1: workers 0, 1; ", line) for line in lines)
    assert any(re.match(r"holdfast: 40 steps in .* on 2 workers", line) for line in lines)


@pytest.mark.slow
def test_the_option_plain_turns_the_live_display_off(tmp_path: Path) -> None:
    options = ["--nproc", "1", "--virtual", "2", "--plain"]
    code, output = run_on_terminal([*options, *SCRIPT[:1], "--steps", "2"], tmp_path / "run")
    assert code == 0, output
    assert "\x1b[" not in output


@pytest.mark.slow
def test_a_mistake_of_the_script_is_shown_whole(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "print('half a line', end='', flush=True)\nraise ValueError('my [bold] words')"
    )
    code, output = run_on_terminal(["--nproc", "1", str(script)], tmp_path / "run")
    assert code == 1
    text = "\n".join(whole_lines(output))
    assert "half a line" in text
    assert "ValueError: my [bold] words" in text


TALKATIVE = """
import torch, holdfast
job = holdfast.join(seed=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(32, 2)), batch_size=2)
for step in job.steps(data, until=20):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    for line in range(1000):
        print(step.index, line, "x" * 100)
"""


@pytest.mark.slow
def test_a_job_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "job.py", tmp_path / "run"
    script.write_text(TALKATIVE)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--run-dir", str(run_dir)]
    with subprocess.Popen(
        [*command, "--nproc", "1", "--virtual", "2", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        found = b""
        while b"0 0 xxx" not in found:
            found += os.read(ours, 1 << 12)
        os.close(ours)
        assert process.wait(100) == 0
    assert RunDir(run_dir).outcome() == ""
