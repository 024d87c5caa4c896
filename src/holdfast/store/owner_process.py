"""Knows whether a process that left something in a shared storage still exists."""

from __future__ import annotations

import functools
import os
import socket
import time

STALE_S = 86_400.0  # what another machine began is given up after this


@functools.cache
def name_scope() -> str:
    """Name the scope of process numbers: this boot of this machine, this PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def is_gone(at_home: bool, pid: int, since: float) -> bool:
    """Return whether a process has ended, as far as can be known from here.

    `at_home`: process `pid` belongs to the scope that `name_scope` names. `since`: the time of the
    file that it has left, in seconds of the clock.
    """
    if at_home:
        return not os.path.exists(f"/proc/{pid}")
    return time.time() - since > STALE_S
