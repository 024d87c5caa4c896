"""Finds and cuts the TCP connections of a process group that another library made.

Gloo offers no way to abort: its `abort` and `shutdown` do nothing. But a socket that is shut down
fails at once on both sides, which is exactly what aborting a view needs. The sockets of a group are
those that appeared while it was built and that join a listening port of one of its members, so a
connection that the user's code opens at the same moment is never touched.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection

# struct tcp_info of linux/tcp.h: retransmits and probes are its bytes 2 and 3, and the age of the
# newest acknowledgement and of the newest data are the 12th and 13th of the words that follow.
_COUNTS = struct.Struct("=2x2B")
_AGES_MS = struct.Struct("=2I")
_AGES_AT = 8 + 11 * 4
_ESTABLISHED = 1  # the first byte of struct tcp_info
PROBE_S = 1  # between probes of an idle connection
PROBES_MAX = 100  # high, as we decide when a link is lost


def socket_inodes() -> dict[int, int]:
    """Return inode -> file descriptor of every socket of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def listening_port(inodes: Collection[int]) -> int:
    """Return the TCP port on which one of these sockets listens; 0 if none does."""
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{family}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[9]) in inodes:
                    return int(fields[1].rpartition(":")[2], 16)
    return 0


def keep_group_sockets(old: Collection[int], ports: Collection[int]) -> list[socket.socket]:
    """Duplicate the connected sockets that are not in `old` and end in one of `ports`.

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


def probe(each: socket.socket) -> None:
    """Have the kernel ask an idle connection's peer every second whether it is still there."""
    each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES_MAX)


def any_ended(sockets: Collection[socket.socket]) -> bool:
    """Tell whether one of these connections has ended, in one direction at least."""
    for each in sockets:
        with contextlib.suppress(OSError):
            if each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
                return True
    return False


def silent_peers(sockets: Collection[socket.socket], silence_s: float) -> set[str]:
    """Return addresses of peers whose kernel has not answered for `silence_s` though asked.

    A frozen process's kernel answers; so silence is the network's, or the whole machine's.
    """
    found = set()
    for each in sockets:
        with contextlib.suppress(OSError):
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            retransmits, probes = _COUNTS.unpack_from(info)
            data_ms, ack_ms = _AGES_MS.unpack_from(info, _AGES_AT)
            if (retransmits or probes) and min(data_ms, ack_ms) >= silence_s * 1000:
                found.add(str(each.getpeername()[0]))
    return found


def unanswered(old: Collection[int]) -> set[str]:
    """Return addresses to which sockets that are not in `old` are still trying to connect."""
    mine = socket_inodes().keys()
    found = set()
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{family}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                inode = int(fields[9])
                if fields[3] == "02" and inode in mine and inode not in old:
                    found.add(_address(fields[2].partition(":")[0]))
    return found


def _address(digits: str) -> str:
    """Decode the kernel's tables: 32-bit words in the machine's byte order, as hexadecimal."""
    words = [bytes.fromhex(digits[i : i + 8]) for i in range(0, len(digits), 8)]
    packed = b"".join(w[::-1] if sys.byteorder == "little" else w for w in words)
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
