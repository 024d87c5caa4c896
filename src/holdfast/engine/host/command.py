"""Run one external command for a bounded time, keep the head of its output, leave nothing behind.

The command has a process group of its own, which is killed when the command has ended, when its
time is over, and when this process is asked to end (SIGTERM). A process that leaves the group on
purpose (setsid) is let go.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from holdfast.engine.host.external_checks import CommandSample
from holdfast.engine.net.readiness import is_readable, wait_readable

HEAD_BYTES = 4096  # kept of each output; the rest is read and thrown away
REAP_S = 0.5


def run_command(command: list[str], limit_s: float) -> CommandSample:
    """Run a command to its end, or kill it after `limit_s` seconds."""
    woken, wake = os.pipe()
    # It only leaves word: to leave while a process is being started would be to forget it.
    before = signal.signal(signal.SIGTERM, lambda number, frame: os.write(wake, b"x") and None)
    try:
        return _run(command, limit_s, woken)
    finally:
        signal.signal(signal.SIGTERM, before)
        asked = is_readable(woken)
        os.close(woken)
        os.close(wake)
        if asked:
            sys.exit(1)


def _run(command: list[str], limit_s: float, woken: int) -> CommandSample:
    try:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return CommandSample(failure=f"cannot start {command[0]}: {reason}")
    assert popen.stdout is not None
    assert popen.stderr is not None
    with popen.stdout as out, popen.stderr as err:
        try:
            heads, ended = _read(popen.pid, (out.fileno(), err.fileno()), limit_s, woken)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)  # not yet reaped, so the number is still its
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(REAP_S)
    failure = "" if ended else f"no answer in {limit_s:g} s"
    if popen.returncode is None:
        failure += ", and it cannot even be killed"
    elif ended and popen.returncode < 0:
        failure = f"killed by signal {-popen.returncode}"
    status = popen.returncode if ended and not failure else None
    return CommandSample(status=status, failure=failure, said=_first_line(heads))


def _read(pid: int, pipes: tuple[int, ...], limit_s: float, woken: int) -> tuple[list[bytes], bool]:
    """Read until the process ends; returns (the heads of its outputs, whether it has ended)."""
    heads = dict.fromkeys(pipes, b"")
    ending = os.pidfd_open(pid)
    waiting = [ending, woken, *pipes]
    end = time.monotonic() + limit_s
    try:
        while (left_s := end - time.monotonic()) > 0:
            ready = wait_readable(waiting, left_s)
            for pipe in (pipe for pipe in pipes if pipe in ready):
                data = os.read(pipe, 1 << 16)
                heads[pipe] = (heads[pipe] + data)[:HEAD_BYTES]
                if not data:
                    waiting.remove(pipe)
            # Its output was there before it ended, so it has been read.
            if ending in ready or woken in ready:
                return list(heads.values()), ending in ready
        return list(heads.values()), False
    finally:
        os.close(ending)


def _first_line(heads: list[bytes]) -> str:
    """Return the first line that is not blank, in the outputs' order."""
    lines = [line for head in heads for line in head.decode(errors="replace").splitlines()]
    return next((line.strip() for line in lines if line.strip()), "")
