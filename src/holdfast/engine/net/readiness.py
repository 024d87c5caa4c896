"""Waits until descriptors can be read, whatever their numbers are.

`select.select` fails for a descriptor above 1023, and a training process has more of them as soon
as many tensors are shared with data workers.
"""

from __future__ import annotations

import errno
import math
import os
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar

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
