"""Binds the lives of processes to the processes that started them (Linux).

    python -m holdfast.engine.host.lifetime PARENT_PID MODULE ARGS...

The command runs a module as a program that ends with the thread that started it.

The processes that a script has started end together with its worker. A process group is not enough:
a process that starts a session of its own leaves the group. So every worker is the *subreaper* of
all processes below it: the kernel gives it those whose parents end. If a worker ends, also by
SIGKILL, the kernel gives them to the next subreaper above it, which is the fork server, the agent
or the launcher. None of these has started them, and so it kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from holdfast.engine.net.standard_streams import print_plain

PR_SET_PDEATHSIG = 1


def end_lost(why: str) -> NoReturn:
    """End this process at once: it is lost, and its script has not failed."""
    with contextlib.suppress(OSError, ValueError):
        print_plain(f"holdfast: this process ends: {why}", file=sys.stderr)
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


def die_with_parent(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies; exit if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


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


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
