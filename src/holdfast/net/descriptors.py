"""Keeps descriptors in order: the first three are open, and a lack of others is noticed."""

from __future__ import annotations

import os
import resource
import sys

SOFT_MAX = 1 << 16  # more would slow down programs that close all descriptors they may have
FEW_SHARE = 0.1


def fill_standard_streams() -> None:
    """Open standard input, output and error where they are closed, for this process and children.

    Otherwise the next sockets and files would get their numbers, and with these all output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel takes the lowest number
            os.set_inheritable(number, True)
    # Python has made no streams for closed descriptors: print() would use the wrong one, or none.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", buffering=1, closefd=False)


def raise_limit() -> None:
    """Allow this process and its children as many descriptors as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorWatch:
    """Warns once that few descriptors are left."""

    def __init__(self) -> None:
        self._said = False

    def complaint(self) -> str:
        """Return what to say now: one sentence the first time that few are left, else nothing.

        The kernel hands out the lowest free number, so a high one means that those below are taken.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._said or soft == resource.RLIM_INFINITY:
            return ""
        try:
            lowest = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            lowest = soft
        else:
            os.close(lowest)
        if lowest < soft * (1 - FEW_SHARE):
            return ""
        self._said = True
        return (
            f"of {soft} file descriptors {lowest} are in use: raise the limit (ulimit -n), or look "
            "for files and connections that the script does not close"
        )
