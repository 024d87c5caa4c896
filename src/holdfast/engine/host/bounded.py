"""Run measurements in other processes, which are never waited for longer than a bound.

A thread that is stuck in a dead disk or driver cannot be ended, and would keep its process from
ending too. So a call that may hang runs in a child, which is killed at its limit and, if even
that does not help, left behind: nobody waits for any of its pipes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL, Signals

REAP_S = 0.5
LINE_BYTES_MAX = 1 << 20
RESTART_S = 60.0
CHILD = "holdfast.engine.host.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAnswer:
    """An answer is what a child said until its end or limit."""

    lines: tuple[bytes, ...] = ()
    failure: str = ""  # empty when it ended well
    hung: bool = False


def child_command(name: str, *, watch: bool = False) -> list[str]:
    """Return the command that runs one of the measurements of child.py."""
    how = "watch" if watch else "once"
    return [sys.executable, "-m", CHILD, how, name, str(os.getpid())]


def run_bounded(command: Sequence[str], request: bytes, limit_s: float) -> ChildAnswer:
    """Run a measurement's command to its end, or kill it after `limit_s` seconds."""
    try:
        popen = _start(command, stderr=subprocess.PIPE)
    except OSError as error:
        return ChildAnswer(failure=f"cannot start {command[0]}: {error.strerror}")
    try:
        out, err = popen.communicate(request, timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        stuck = "" if _kill(popen) else ", and cannot even be killed"
        lines = _lines(late.output or b"")
        return ChildAnswer(lines=lines, failure=f"no answer in {limit_s:g} s{stuck}", hung=True)
    if popen.returncode != 0:
        words = err.decode(errors="replace").strip().splitlines()
        how = words[-1] if words else _describe_end(popen.returncode)
        return ChildAnswer(lines=_lines(out), failure=how)
    return ChildAnswer(lines=_lines(out))


def _start(command: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, close_fds=True
    )


def _lines(out: bytes) -> tuple[bytes, ...]:
    """Split what a child said into lines, and leave out an unfinished one."""
    whole, _, _ = out.rpartition(b"\n")
    return tuple(line for line in whole.split(b"\n") if line)


def _describe_end(code: int) -> str:
    return f"the measurement was killed by signal {-code}" if code < 0 else f"exit code {code}"


def _kill(popen: subprocess.Popen[bytes]) -> bool:
    """Kill a child; False when it does not even die, since it is stuck in the kernel."""
    popen.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(REAP_S)
    for pipe in (popen.stdin, popen.stdout, popen.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return popen.returncode is not None


class Watcher:
    """A watcher keeps a child that measures whenever it is asked; asking and reading never wait.

    Start it from a thread that stays, since the kernel ends the child together with that thread.
    `end`: the signal by which the child is ended.
    """

    def __init__(self, command: Sequence[str], request: bytes, end: Signals = SIGKILL) -> None:
        self._command = command
        self._request = request
        self._end = end
        self._child: list[subprocess.Popen[bytes]] = []  # none or one
        self._abandoned: list[subprocess.Popen[bytes]] = []  # killed, not yet reaped
        self._buffer = b""
        self._asked_s = 0.0
        self._waiting = False
        self._restart_s = float("-inf")  # not before

    @property
    def pid(self) -> int:
        """Return the child's process id; 0 while there is no child."""
        return self._child[0].pid if self._child else 0

    def fileno(self) -> int:
        """Return what an event loop waits on for an answer; -1 while there is no child."""
        for popen in self._child:
            assert popen.stdout is not None
            return popen.stdout.fileno()
        return -1

    def waited_s(self, now: float) -> float:
        """Return for how long an answer has been outstanding."""
        return now - self._asked_s if self._waiting else 0.0

    def ask(self, now: float) -> str:
        """Ask for one more measurement, unless one is outstanding. Returns the problem, or ""."""
        self._abandoned = [popen for popen in self._abandoned if popen.poll() is None]
        if self._waiting:
            return ""
        if not self._child:
            if now < self._restart_s or self._abandoned:
                return "its last measurement failed; it is tried again later"
            self._restart_s = now + RESTART_S
            try:
                self._child = [_start(self._command, stderr=subprocess.DEVNULL)]
            except OSError as error:
                return f"cannot start {self._command[0]}: {error.strerror}"
            self._buffer = b""
            self._put(self._request + b"\n")
        self._put(b"\n")
        self._asked_s, self._waiting = now, True
        return ""

    def poll(self) -> tuple[bytes | None, str]:
        """Read the answer, or None if it has not come, and the problem, or an empty string."""
        for popen in self._child:
            assert popen.stdout is not None
            os.set_blocking(popen.stdout.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while len(self._buffer) <= LINE_BYTES_MAX:
                    data = os.read(popen.stdout.fileno(), 1 << 16)
                    if not data:
                        code = popen.poll()
                        self.close()
                        return None, _describe_end(
                            code
                        ) if code is not None else "the measurement ended"
                    self._buffer += data
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer, self._waiting = rest, False
                return line, ""
            if len(self._buffer) > LINE_BYTES_MAX:
                self.close()
                return None, "the measurement says too much"
        return None, ""

    def close(self) -> None:
        """End the child; one that cannot be killed is left to the kernel."""
        for popen in self._child:
            popen.send_signal(self._end)
            for pipe in (popen.stdin, popen.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            if popen.poll() is None:
                self._abandoned.append(popen)
        self._child = []
        self._waiting = False

    def _put(self, data: bytes) -> None:
        for popen in self._child:
            assert popen.stdin is not None
            os.set_blocking(popen.stdin.fileno(), False)
            with contextlib.suppress(OSError):  # a child that has ended shows when it is polled
                os.write(popen.stdin.fileno(), data)
