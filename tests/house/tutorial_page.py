"""Runs the tutorial: writes its files, types its commands, and compares their output.

    python tests/house/tutorial_page.py FOLDER     run it in a new folder, and print all output

A line of the page counts as printed if the command prints it with other numbers. `...` stands for
lines that are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
COMMAND_S = 240.0  # bounds a hang
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS = re.compile(r"[\d.]+ (?:ms|s|min)\b")
FORMS = (("were", "was"), ("tasks", "task"), ("workers", "worker"), ("incidents", "incident"))


@dataclass
class Block:
    """A block of code on the page: a file, commands with their output, or output alone."""

    kind: str
    title: str
    text: str

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command with the lines that are shown below it."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            yield command, lines


def blocks() -> list[Block]:
    """Return the blocks of the page, in order."""
    return [Block(*found) for found in BLOCK.findall(PAGE.read_text())]


def blur(line: str) -> str:
    """Return a line without what differs from run to run: numbers, digests and widths."""
    line = re.sub(r"[━─]+", "-", SECONDS.sub("N s", line))
    line = re.sub(r"\b[0-9a-f]{16}\b", "DIGEST", line)
    line = re.sub(r"│ (?:computing|waiting) .*", "│ STATE", line)
    for several, one in FORMS:
        line = re.sub(rf"\b{several}\b", one, line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:-]*", "N", line)).strip()


def lacking(shown: list[str], printed: list[str]) -> str:
    """Return the first line of the page that was not printed, in order; empty if there is none."""
    rest = iter([blur(line) for line in printed])
    for line in shown:
        if line.strip() not in ("", "...") and blur(line) not in rest:
            return line
    return ""


@dataclass
class Reader:
    """Does what the page says in `folder`. Raises AssertionError if something else is printed."""

    folder: Path
    printed: list[str] = field(default_factory=list)  # all of it
    _job: subprocess.Popen[str] | None = None
    _table: str = ""  # the workers, as `holdfast status` has shown them

    def follow(self) -> None:
        """Go through the page from top to bottom."""
        try:
            for block in blocks():
                if block.kind == "python":
                    (self.folder / block.title).write_text(block.text)
                elif block.kind == "console":
                    for command, shown in block.commands():
                        self._check(command, shown, self._type(command))
                else:
                    self._check("the job", block.text.split("\n"), self._await_job())
        finally:
            if self._job is not None and self._job.poll() is None:
                self._job.kill()

    def _check(self, command: str, shown: list[str], printed: str) -> None:
        self.printed += [f"$ {command}", *printed.rstrip("\n").split("\n")]
        line = lacking(shown, printed.split("\n"))
        assert not line, f"{command} did not print {line!r}:\n{printed}"

    def _type(self, command: str) -> str:
        if command.endswith(" &"):
            self._job = self._start(command[:-2])
            return ""
        if command.startswith("kill "):
            self._kill(command)
            return ""
        if command.startswith("holdfast status"):
            self._table = self._look(command, r"│ 3 +│ \d+ +│ 1 +│ computing +│ [1-9]")
            return self._table
        if command.startswith("holdfast ckpt list"):
            return self._look(command, r"│ 500 +│")
        return self._finish(self._start(command))

    def _start(self, command: str) -> subprocess.Popen[str]:
        words = shlex.split(command)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env={**os.environ, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _finish(self, process: subprocess.Popen[str]) -> str:
        printed, _ = process.communicate(timeout=COMMAND_S)
        assert process.returncode == 0, f"{process.args} ended with {process.returncode}: {printed}"
        return printed

    def _await_job(self) -> str:
        assert self._job is not None
        return self._finish(self._job)

    def _look(self, command: str, pattern: str) -> str:
        """Repeat a command until it prints a line of this pattern."""
        end = time.monotonic() + COMMAND_S
        while time.monotonic() < end:
            process = self._start(command)
            printed, _ = process.communicate(timeout=COMMAND_S)
            if re.search(pattern, printed):
                return printed
            assert self._job is not None
            assert self._job.poll() is None, self._await_job()
        raise AssertionError(f"{command} printed no line like {pattern}: {printed}")

    def _kill(self, command: str) -> None:
        assert self._job is not None
        if command.endswith("$!"):
            self._job.kill()
            self._job.communicate(timeout=COMMAND_S)
            return
        row = re.search(r"│ 2 +│ (\d+)", self._table)
        assert row is not None, self._table
        os.kill(int(row[1]), signal.SIGKILL)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir()
    reader = Reader(Path(sys.argv[1]))
    try:
        reader.follow()
    finally:
        print("\n".join(reader.printed))
