"""Whether a process that left something in a storage is still there, whoever shares the storage."""

from __future__ import annotations

import functools
import os
import socket
import time

STALE_S = 86_400.0  # after which what was begun on another machine is given up


@functools.cache
def here() -> str:
    """Where a process number means something: this boot of this machine, this PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def gone(at_home: bool, pid: int, since: float) -> bool:
    """`at_home`: process `pid` is, or was, one of `here`. `since`: by the clock, seconds."""
    if at_home:
        return not os.path.exists(f"/proc/{pid}")
    return time.time() - since > STALE_S
