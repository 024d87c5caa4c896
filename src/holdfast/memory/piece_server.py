"""Serves the pieces that a node holds to workers of the same job, over TCP.

A request and its answer are MessagePack with their length before them; a piece follows its answer.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from holdfast.core.errors import Damaged, WireError
from holdfast.memory.arena import PieceEntry, Table
from holdfast.memory.node_memory import NodeMemory
from holdfast.net import peer_stream

MAGIC = b"hpiece\0\1"
LENGTH = struct.Struct("!I")
MESSAGE_BYTES_MAX = 64 << 20
STRANGERS_MAX = 64  # connections that have proved nothing yet
T = TypeVar("T")


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a piece in a file of that number; without an entry, for what there is."""

    file: int = 0
    entry: PieceEntry | None = None
    index: int = 0


class PieceAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Says what there is, or whether the piece is sound and follows."""

    sound: bool = False
    tables: Mapping[int, Table] = {}


class PieceServer:
    """Serves one node's memory to whoever holds the job's peer key."""

    def __init__(self, memory: NodeMemory, key: bytes) -> None:
        self._memory = memory
        self._key = key
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)

    def listen(self, host: str) -> str:
        """Begin to serve; returns where. OSError."""
        listener, address = peer_stream.listen(host)
        thread = threading.Thread(
            target=self._accept, args=(listener,), name="holdfast-pieces", daemon=True
        )
        thread.start()
        return address

    def _accept(self, listener: socket.socket) -> None:
        while True:
            channel, _ = listener.accept()
            if not self._strangers.acquire(blocking=False):
                channel.close()
                continue
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: socket.socket) -> None:
        with channel:
            try:
                peer_stream.accept(channel, self._key, MAGIC)
            except (OSError, WireError):
                return  # a stranger
            finally:
                self._strangers.release()
            try:
                while True:
                    self._answer(channel, receive(channel, PieceRequest))
            except (OSError, WireError):
                return  # it has gone, or sends what cannot be read

    def _answer(self, channel: socket.socket, request: PieceRequest) -> None:
        if request.entry is None:
            send(channel, PieceAnswer(sound=True, tables=self._memory.tables()))
            return
        try:
            piece = self._memory.piece(request.file, request.entry, request.index)
        except Damaged:
            send(channel, PieceAnswer(sound=False))
            return
        send(channel, PieceAnswer(sound=True))
        channel.sendall(piece)


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. OSError."""
    data = msgspec.msgpack.encode(message)
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket, kind: type[T]) -> T:
    """Receive a message of this kind. OSError, WireError."""
    (length,) = LENGTH.unpack(peer_stream.exactly(channel, LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise WireError(f"a message about pieces has {length} bytes")
    try:
        return msgspec.msgpack.decode(peer_stream.exactly(channel, length), type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a message about pieces cannot be read: {error}") from None
