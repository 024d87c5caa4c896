"""Finding and cutting the TCP connections of a process group that another library made.

Gloo offers no way to abort: its `abort` and `shutdown` do nothing. But a socket that is shut down
fails at once on both sides, which is exactly what severing a view needs. The sockets of a group are
those that appeared while it was built and that join a listening port of one of its members, so a
connection that the user's code opens at the same moment is never touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection


def socket_inodes() -> dict[int, int]:
    """inode -> file descriptor of every socket of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def listening_port(inodes: Collection[int]) -> int:
    """The TCP port on which one of these sockets listens; 0 when none does."""
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{family}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[9]) in inodes:
                    return int(fields[1].rpartition(":")[2], 16)
    return 0


def keep_group_sockets(old: Collection[int], ports: Collection[int]) -> list[socket.socket]:
    """Duplicates of the connected sockets that are not in `old` and end in one of `ports`.

    A duplicate stays valid when the library closes its own descriptor, so cutting can never hit
    another file that was given the same number.
    """
    kept: list[socket.socket] = []
    for inode, fd in socket_inodes().items():
        if inode in old:
            continue
        try:
            candidate = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        if _joins(candidate, ports):
            kept.append(candidate)
        else:
            candidate.close()
    return kept


def _joins(candidate: socket.socket, ports: Collection[int]) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return candidate.getsockname()[1] in ports or candidate.getpeername()[1] in ports
    except OSError:  # a listening socket has no peer
        return False


def cut(sockets: Collection[socket.socket]) -> None:
    """Shut both directions down: the library and the peer see the connection end at once."""
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
