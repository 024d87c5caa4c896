"""Moves bytes between two members of a group: plain, or encrypted with TLS. Nothing here blocks.

With TLS a pair of members has two connections, one for each direction: one of OpenSSL's objects
would have to be read before it could be written to, and the other way round.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.engine.net import peer_stream

PARTS_MAX = 1000  # parts per call; the kernel takes 1,024
RECORD_BYTES = 1 << 14  # the most that TLS encrypts as one record
WRITE_BYTES = 1 << 18  # bytes given to OpenSSL at a time

Part = memoryview | bytes


class Wire(Protocol):
    """Sends and receives bytes for one pair of members."""

    #: The connection to send by, and the one to receive by; they may be the same.
    sends: socket.socket
    receives: socket.socket

    @property
    def channels(self) -> Sequence[socket.socket]:
        """Return the connections, to ask the kernel about them."""
        ...

    def send(self, parts: Sequence[Part]) -> int:
        """Hand bytes to the kernel, as many as it takes now; return their number.

        The unsent rest must come first in the next call. OSError.
        """
        ...

    def receive(self, place: memoryview) -> int | None:
        """Receive what is there, up to `place`; None: nothing is there. 0: the end. OSError."""
        ...

    def shut(self) -> None:
        """End it on both sides. Never blocks."""
        ...

    def close(self) -> None: ...


class PlainWire:
    """Implements `Wire` by one TCP connection."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.sends = self.receives = channel
        self.channels = (channel,)

    def send(self, parts: Sequence[Part]) -> int:
        try:
            return self.sends.sendmsg(parts[:PARTS_MAX])
        except BlockingIOError:
            return 0

    def receive(self, place: memoryview) -> int | None:
        try:
            return self.receives.recv_into(place)
        except BlockingIOError:
            return None

    def shut(self) -> None:
        peer_stream.shut(self.sends)

    def close(self) -> None:
        self.sends.close()


class TlsWire:
    """Implements `Wire` by two encrypted connections, one to send by and one to receive by."""

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
