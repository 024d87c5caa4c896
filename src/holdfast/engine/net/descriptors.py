"""Notices a lack of file descriptors, and raises their limit."""

from __future__ import annotations

import os
import resource

SOFT_MAX = 1 << 16  # more would slow down programs that close all descriptors they may have
FEW_SHARE = 0.1


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
