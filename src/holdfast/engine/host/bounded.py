"""Runs measurements in other processes, and waits for none of them longer than a bound.

    python -m holdfast.engine.host.bounded once|watch NAME PARENT_PID

A thread that is stuck in a dead disk or driver cannot be ended, and would keep its process from
ending too. So a call that may hang runs in a child, which is killed at its limit and, if even
that does not help, left behind, with all its pipes.

The child is the command above. The first line of its input is a JSON object of arguments. `once`
prints one JSON line; `watch` prints one for every further line of input, until there are no more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL, Signals
from typing import Any

import msgspec

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.host.lifetime import die_with_parent, leave_ending_signals
from holdfast.engine.net.standard_streams import print_plain

REAP_S = 0.5
LINE_BYTES_MAX = 1 << 20
RESTART_S = 60.0
CHILD = "holdfast.engine.host.bounded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAnswer:
    """An answer is the output of a child until its end or limit."""

    lines: tuple[bytes, ...] = ()
    failure: str = ""  # empty when it ended well
    hung: bool = False


def child_command(name: str, *, watch: bool = False) -> list[str]:
    """Return the command that runs one of the MEASUREMENTS."""
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
    """Split the output of a child into lines, and leave out an unfinished one."""
    whole, _, _ = out.rpartition(b"\n")
    return tuple(line for line in whole.split(b"\n") if line)


def _describe_end(code: int) -> str:
    return f"the measurement was killed by signal {-code}" if code < 0 else f"exit code {code}"


def _kill(popen: subprocess.Popen[bytes]) -> bool:
    """Kill a child; False when it does not even die, because it is stuck in the kernel."""
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
        """Return the descriptor for an event loop that waits for an answer; -1 without a child."""
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
        """End the child; if it cannot be killed, it is left to the kernel."""
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


# Modules and functions that measure; imported only in the child, since some need numpy.
MEASUREMENTS = {
    "arithmetic": ("compute", "try_arithmetic"),
    "memory": ("compute", "try_memory"),
    "disk": ("disk_speed", "try_disk"),
    "gpu": ("gpu", "gpu_looker"),  # opens the driver once and returns what looks again and again
    "kernel-log": ("kernel_log", "read_log"),
    "peer": ("network_speed", "try_peer"),
    "external": ("external_checks", "run_command"),
}


def main(argv: list[str]) -> int:
    how, name, parent = argv
    # By SIGTERM an external command's keeper can still end the command.
    if name == "external":
        die_with_parent(int(parent), signal.SIGTERM)
    else:
        die_with_parent(int(parent))
        leave_ending_signals()
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, Any])
    module, function = MEASUREMENTS[name]
    try:
        found = getattr(importlib.import_module(f"holdfast.engine.host.{module}"), function)
        look = found(**arguments) if name == "gpu" else functools.partial(found, **arguments)
        if how == "once":
            _tell(look())
            return 0
        while sys.stdin.buffer.readline():
            _tell(look())
    except (HoldfastError, OSError, MemoryError) as error:
        print_plain(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _tell(sample: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(sample) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
