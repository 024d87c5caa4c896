"""Knows whether a process that left something in a shared storage still exists."""

from __future__ import annotations

import functools
import os
import socket


@functools.cache
def name_scope() -> str:
    """Name the scope of process numbers: this boot of this machine, this PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def has_ended(at_home: bool, pid: int) -> bool:
    """Return whether a process has certainly ended; of one elsewhere that is never known.

    `at_home`: process `pid` belongs to the scope that `name_scope` names.
    """
    return at_home and not os.path.exists(f"/proc/{pid}")
