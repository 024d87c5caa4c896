"""Moves bytes between two members of a group: plain, or encrypted with TLS. No call blocks.

With TLS a pair of members has two connections, one for each direction: one of OpenSSL's objects
would have to be read before it could be written to, and the other way round. The kernel knows
whether a connection stands, and whether the peer still answers.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Sequence

from holdfast.engine.net import peer_stream

PARTS_MAX = 1000  # parts per call; the kernel takes 1,024
RECORD_BYTES = 1 << 14  # the most that TLS encrypts as one record
WRITE_BYTES = 1 << 18  # bytes given to OpenSSL at a time

Part = memoryview | bytes
# struct tcp_info of linux/tcp.h: retransmits and probes are its bytes 2 and 3, and the age of the
# newest acknowledgement and of the newest data are the 12th and 13th of the words that follow.
_COUNTS = struct.Struct("=2x2B")
_AGES_MS = struct.Struct("=2I")
_AGES_AT = 8 + 11 * 4
_INFO_BYTES = 104
_ESTABLISHED, _CONNECTING = 1, 2  # the first byte of struct tcp_info
LOCAL_SEND_BYTES = 1 << 18
PROBE_S = 1  # between probes of an idle connection
# It is high, because Holdfast decides when a link is lost.
PROBES_MAX = 100


class PlainWire:
    """Sends and receives bytes for one pair of members by one TCP connection.

    `sends`, `receives`: the connection to send by, and the one to receive by.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.sends = self.receives = channel
        self.channels = (channel,)

    def send(self, parts: Sequence[Part]) -> int:
        """Hand bytes to the kernel, as many as it takes now; return their number.

        The unsent rest must come first in the next call. OSError.
        """
        try:
            return self.sends.sendmsg(parts[:PARTS_MAX])
        except BlockingIOError:
            return 0

    def receive(self, place: memoryview) -> int | None:
        """Receive the bytes that have arrived, up to `place`; None: none. 0: the end. OSError."""
        try:
            return self.receives.recv_into(place)
        except BlockingIOError:
            return None

    def shut(self) -> None:
        """End it on both sides. Never blocks."""
        peer_stream.shut(self.sends)

    def close(self) -> None:
        self.sends.close()


class TlsWire:
    """Does the same by two encrypted connections, one to send by and one to receive by."""

    def __init__(self, sends: socket.socket, receives: socket.socket) -> None:
        for channel in (sends, receives):
            channel.setblocking(False)
        self.sends = sends
        self.receives = receives
        self.channels = (sends, receives)

    def send(self, parts: Sequence[Part]) -> int:
        sent = 0
        for chunk in _chunks(parts):
            try:
                self.sends.send(chunk)  # all of it, or it has to be called again with it
            except ssl.SSLWantWriteError:
                return sent
            sent += len(chunk)
        return sent

    def receive(self, place: memoryview) -> int | None:
        try:
            return self.receives.recv_into(place)
        except ssl.SSLWantReadError:
            return None

    def shut(self) -> None:
        for channel in self.channels:
            peer_stream.shut(channel)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


Wire = PlainWire | TlsWire


def _chunks(parts: Sequence[Part]) -> Iterator[Part]:
    """Divide bytes for single calls of OpenSSL; small parts are joined, to make one record.

    A call that would block must be made again with bytes that begin with the same ones. So the
    first chunk of the remaining bytes has to begin with all of the chunk that was not sent.
    """
    small: list[Part] = []
    size = 0
    for part in parts:
        if size and size + len(part) > RECORD_BYTES:
            yield b"".join(small)
            small, size = [], 0
        if len(part) <= RECORD_BYTES:
            small.append(part)
            size += len(part)
        else:
            for start in range(0, len(part), WRITE_BYTES):
                yield part[start : start + WRITE_BYTES]
    if size:
        yield b"".join(small)


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
