"""Keeps one placement of a local manager: its process and all descendants end together.

    python -m holdfast.clusters.local.local_place KEEPER_PID COMMAND ...

SIGTERM is passed on; after a while, or when the process with KEEPER_PID ends, everything is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.engine.host.lifetime import adopt_orphans, leave_ending_signals
from holdfast.engine.net.descriptors import wait_readable

END_S = 15.0  # between SIGTERM and SIGKILL


def main(argv: list[str]) -> int:
    adopt_orphans()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    leave_ending_signals()
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        keeper = os.pidfd_open(int(argv[0]))
    except ProcessLookupError:
        return 1
    child = subprocess.Popen(argv[1:])
    child_fd = os.pidfd_open(child.pid)
    until: float | None = None
    while child.poll() is None:
        left_s = None if until is None else max(until - time.monotonic(), 0.0)
        ready = wait_readable([keeper, child_fd, wake_read], left_s)
        if keeper in ready or (until is not None and not ready):
            break
        if wake_read in ready:
            os.read(wake_read, 4096)
            child.terminate()
            until = until or time.monotonic() + END_S
    while pids := descendants():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return 0


def descendants() -> list[int]:
    """Return the processes that come from this one, the nearest first."""
    found, parents = [], [os.getpid()]
    while parents:
        children = Path(f"/proc/{parents[0]}/task/{parents.pop(0)}/children")
        with contextlib.suppress(OSError):
            found += (pids := [int(pid) for pid in children.read_text().split()])
            parents += pids
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
