"""Ends the processes that a script has started together with the worker that ran it (Linux).

A process group is not enough: who starts a session of its own leaves the group. So every worker is
the *subreaper* of all processes below it: the kernel gives it those whose parents end. If a worker
ends, also by SIGKILL, the kernel gives them to the next subreaper above it, which is the fork
server, the agent or the launcher. None of these has started them, and so it kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.01


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become the parent of every process below this one whose parent ends, or do not any more."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def end_orphans(own: Collection[int]) -> bool:
    """Kill the adopted children; return whether there were any.

    A child is adopted if it is in another session and not in `own`. Its own children are adopted
    after its end, so look again after a SIGCHLD, or soon.
    """
    orphans = [pid for pid in list_children() if pid not in own and _leads_own_life(pid)]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def end_all_orphans(own: Collection[int], within_s: float) -> None:
    """Kill the adopted children and all processes below them, for a limited time."""
    until = time.monotonic() + within_s
    while end_orphans(own) and time.monotonic() < until:
        time.sleep(LOOK_S)


def list_children() -> list[int]:
    """Return the children of all threads of this process."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def _leads_own_life(pid: int) -> bool:
    """Return whether a child is in another session than this process."""
    try:
        return os.getsid(pid) != os.getsid(0)
    except OSError:
        return False
