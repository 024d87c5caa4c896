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

from conftest import SCRIPTS

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


def test_a_terminal_has_a_status_line_below_all_other_lines(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--virtual", "2"]
    code, output = run_on_terminal([*options, *SCRIPT], tmp_path / "run")
    assert code == 0, output
    assert STATUS.search(output)
    lines = whole_lines(output)
    assert any(re.fullmatch("[0-9a-f]{64}", line) for line in lines)  # the script's own last line
    assert any(re.match(r"holdfast: view 1: workers 0, 1; ", line) for line in lines)
    assert any(re.match(r"holdfast: 40 steps in .* on 2 workers", line) for line in lines)


def test_there_is_none_where_nobody_wants_it(tmp_path: Path) -> None:
    options = ["--nproc", "1", "--virtual", "2", "--plain"]
    code, output = run_on_terminal([*options, *SCRIPT[:1], "--steps", "2"], tmp_path / "run")
    assert code == 0, output
    assert "\x1b[" not in output


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
