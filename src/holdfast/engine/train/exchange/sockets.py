"""Sets TCP connections up, and asks the kernel whether they stand and the peer still answers."""

from __future__ import annotations

import socket
import struct

# struct tcp_info of linux/tcp.h: retransmits and probes are its bytes 2 and 3, and the age of the
# newest acknowledgement and of the newest data are the 12th and 13th of the words that follow.
_COUNTS = struct.Struct("=2x2B")
_AGES_MS = struct.Struct("=2I")
_AGES_AT = 8 + 11 * 4
_INFO_BYTES = 104
_ESTABLISHED, _CONNECTING = 1, 2  # the first byte of struct tcp_info
LOCAL_SEND_BYTES = 1 << 18
PROBE_S = 1  # between probes of an idle connection
PROBES_MAX = 100  # high, as we decide when a link is lost


def prepare(each: socket.socket) -> None:
    """Set a connection up: small messages leave at once, and an idle peer's kernel is asked.

    It is asked every second whether it is still there.
    """
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if each.getsockname()[0] == each.getpeername()[0]:
        # Within a machine what waits in the kernel is no use: less of it stays in the cache.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES_MAX)


def has_ended(each: socket.socket) -> bool:
    """Return whether a connection has ended, in one direction at least."""
    try:
        return each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    except OSError:
        return True


def is_connecting(each: socket.socket) -> bool:
    """Return whether the other side has not answered yet at all."""
    try:
        return each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CONNECTING
    except OSError:
        return False


def is_silent(each: socket.socket, silence_s: float) -> bool:
    """Return whether the peer's kernel has not answered for `silence_s` though it was asked.

    A frozen process's kernel answers, so silence means the network, or the whole machine.
    """
    try:
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return False
    retransmits, probes = _COUNTS.unpack_from(info)
    data_ms, ack_ms = _AGES_MS.unpack_from(info, _AGES_AT)
    return bool(retransmits or probes) and min(data_ms, ack_ms) >= silence_s * 1000
