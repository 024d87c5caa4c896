"""Waits until descriptors can be read, raises their limit, and notices when few are left.

`select.select` fails for a descriptor above 1023. A training process has more of them if it shares
a large number of tensors with data workers.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar

SOFT_MAX = 1 << 16  # more would slow down programs that close all descriptors they may have
FEW_SHARE = 0.1


def raise_limit() -> None:
    """Raise the limit of descriptors for this process and its children as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorWatch:
    """Warns once that few descriptors are left."""

    def __init__(self) -> None:
        self._said = False

    def complaint(self) -> str:
        """Return a sentence the first time that few are left, else "".

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


MOST_MS = (1 << 31) - 1  # the longest time that poll takes


class HasFileno(Protocol):
    """Has a descriptor, as sockets and pipes do."""

    def fileno(self) -> int: ...


T = TypeVar("T", bound="int | HasFileno")


def wait_readable(sources: Iterable[T], timeout_s: float | None = None) -> list[T]:
    """Return the sources that can be read, or whose other end is closed.

    Wait up to `timeout_s` seconds for the first one, 24 days at most; None: as long as it takes.
    OSError or ValueError for a source that is closed here.
    """
    poll, known = select.poll(), {}
    for source in sources:
        number = source if isinstance(source, int) else source.fileno()
        poll.register(number, select.POLLIN)
        known[number] = source
    ready = poll.poll(
        None if timeout_s is None else math.ceil(min(1e3 * max(timeout_s, 0.0), MOST_MS))
    )
    if any(event & select.POLLNVAL for _, event in ready):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return [known[number] for number, _ in ready]


def is_readable(source: int | HasFileno) -> bool:
    """Return whether something can be read now, or the other end is closed. OSError, ValueError."""
    return bool(wait_readable([source], 0.0))
