"""Carries events, orders and addresses between the processes of a worker, over a socket pair.

Each message is MessagePack in a frame: the name of its type, and its fields.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.types import Peer
from holdfast.engine.wire.frames import Opener, Sealer
from holdfast.engine.wire.messages import Address, StacksRequest

RECEIVED_BYTES = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Is the place where the processes of a worker meet, by torch's store."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Book:
    """Lists the addresses of the members of a view."""

    view: int
    addresses: tuple[tuple[Peer, bytes], ...]


_KINDS = {
    each.__name__: each
    for each in (
        *(*get_args(ef.WorkerEffect), *get_args(ev.WorkerEvent)),
        *(Meeting, Book, Address, StacksRequest),
    )
}
# Made here, and not by the threads that receive: msgspec must not look into a type in two at once.
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()}
_decode_frame = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode


class ShardChannel:
    """Sends to, and receives from, one other process of the worker."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sealer = Sealer(None)
        self._opener = Opener(None)
        self._waiting: list[Any] = []  # messages that arrived with the first one
        self._leaving: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="holdfast-shards", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self._channel.fileno()

    def send(self, message: object) -> None:
        """Send one message, soon and in order; it is lost if the other process has ended."""
        words = type(message).__name__, message
        self._leaving.put(msgspec.msgpack.encode(words, enc_hook=list))  # ranges become lists

    def _write(self) -> None:
        """Send in a thread of its own: the sender may hold a lock that the receiver needs."""
        while True:
            data = self._leaving.get()
            with contextlib.suppress(OSError):
                self._channel.sendall(self._sealer.seal(data))

    def receive_first(self, kind: type[T]) -> T:
        """Wait for the first message, which must be of this kind. WireError, EOFError."""
        while not self._waiting:
            self._waiting = list(self._receive())
        found = self._waiting.pop(0)
        if not isinstance(found, kind):
            raise WireError(f"a worker's process began with a {type(found).__name__}")
        return found

    def receive(self) -> Iterator[Any]:
        """Yield messages in the order in which they were sent. WireError, EOFError."""
        waiting, self._waiting = self._waiting, []
        yield from waiting
        yield from self._receive()

    def _receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived, at least one. WireError, EOFError."""
        try:
            data = self._channel.recv(RECEIVED_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        for payload in self._opener.feed(data):
            try:
                name, fields = _decode_frame(payload)
                yield _DECODERS[name].decode(fields)
            except (msgspec.MsgspecError, KeyError) as error:
                raise WireError(f"a worker's process sends what cannot be read: {error}") from None
