"""Serves the pieces that a node holds to workers of the same job, over TCP.

A piece follows the answer to its request.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from holdfast.engine.core.errors import Damaged
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import PieceEntry, Table
from holdfast.engine.state.memory.node_memory import NodeMemory

MAGIC = b"hpiece\0\1"


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a piece in a file of that number; without an entry, for what there is."""

    file: int = 0
    entry: PieceEntry | None = None
    index: int = 0


class PieceAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Lists the pieces, or says whether the piece is sound and follows."""

    sound: bool = False
    tables: Mapping[int, Table] = {}


class PieceServer:
    """Serves one node's memory to holders of the job's peer key."""

    def __init__(self, memory: NodeMemory, identity: PeerIdentity) -> None:
        self._memory = memory
        self._identity = identity

    def listen(self, host: str) -> str:
        """Begin to serve; returns where. OSError."""
        address, _ = serve(host, self._identity, MAGIC, self._serve)
        return address

    def _serve(self, channel: socket.socket, _: peer_stream.Purpose) -> None:
        while True:
            self._answer(channel, peer_stream.receive_message(channel, PieceRequest))

    def _answer(self, channel: socket.socket, request: PieceRequest) -> None:
        if request.entry is None:
            peer_stream.send_message(channel, PieceAnswer(sound=True, tables=self._memory.tables()))
            return
        try:
            piece = self._memory.piece(request.file, request.entry, request.index)
        except Damaged:
            peer_stream.send_message(channel, PieceAnswer(sound=False))
            return
        peer_stream.send_message(channel, PieceAnswer(sound=True))
        channel.sendall(piece)
