"""Moves bytes between two members of a group: plain, or encrypted with TLS.

OpenSSL's objects must not be read and written by two threads at once. So with TLS a pair of members
has two connections, one for each direction.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.net import peer_stream

PARTS_MAX = 1000  # parts per call; the kernel takes 1,024
RECORD_BYTES = 1 << 14  # the most that TLS encrypts as one record
WRITE_BYTES = 1 << 18  # bytes given to OpenSSL at a time

Part = memoryview | bytes


class Wire(Protocol):
    """Sends and receives bytes for one pair of members. One thread sends, another receives."""

    @property
    def channels(self) -> Sequence[socket.socket]:
        """Return the connections, to ask the kernel about them."""
        ...

    def send(self, parts: Sequence[Part], *, wait: bool) -> int:
        """Hand bytes to the kernel, at least some of them if it may `wait`; return their number.

        The unsent rest must come first in the next call. OSError.
        """
        ...

    def receive(self, place: memoryview, *, whole: bool) -> int:
        """Receive some bytes, or fill `place` if one call can. Return 0 at the end. OSError."""
        ...

    def shut(self) -> None:
        """End it, which frees threads that send or receive. Never blocks."""
        ...

    def close(self) -> None: ...


class PlainWire:
    """Implements `Wire` by one TCP connection."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self._channel = channel
        self.channels = (channel,)

    def send(self, parts: Sequence[Part], *, wait: bool) -> int:
        try:
            return self._channel.sendmsg(parts[:PARTS_MAX], (), 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self, place: memoryview, *, whole: bool) -> int:
        return self._channel.recv_into(place, 0, socket.MSG_WAITALL if whole else 0)

    def shut(self) -> None:
        peer_stream.shut(self._channel)

    def close(self) -> None:
        self._channel.close()


class TlsWire:
    """Implements `Wire` by two encrypted connections, one to send by and one to receive by."""

    def __init__(self, sends: socket.socket, receives: socket.socket) -> None:
        sends.setblocking(False)
        receives.setblocking(True)
        self._sends = sends
        self._receives = receives
        self.channels = (sends, receives)
        self._waits = False  # whether a send blocks

    def send(self, parts: Sequence[Part], *, wait: bool) -> int:
        if wait != self._waits:
            self._sends.setblocking(wait)
            self._waits = wait
        sent = 0
        for chunk in _chunks(parts):
            try:
                self._sends.send(chunk)  # all of it, or it has to be called again with it
            except ssl.SSLWantWriteError:
                return sent
            sent += len(chunk)
        return sent

    def receive(self, place: memoryview, *, whole: bool) -> int:
        return self._receives.recv_into(place)

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
