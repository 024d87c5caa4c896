"""Bind the life of a process to that of the one that started it (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
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
    """Have the kernel signal this process when its parent dies; exit if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
