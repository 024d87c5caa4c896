"""Puts pieces into the memory of a worker's other nodes, where its processes there receive them.

What a process receives it writes into its own file, and answers: so the sender knows that a piece
has arrived before it continues. The processes of a worker live and die together, so this code
handles the loss of none.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from holdfast.engine.core.errors import WorldError
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import PieceArena, PieceEntry, PieceShelf

MAGIC = b"hpost\0\0\1"


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """Announces pieces that follow one after the other, each of `entry.size` bytes."""

    entry: PieceEntry
    shelf: PieceShelf


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """Confirms that pieces are in memory; `problem`: why they are not. `full`: there is no room."""

    problem: str = ""
    full: bool = False


class PiecePost:
    """Sends pieces to other processes of this worker, and writes theirs into `arena`.

    `identity`: this process's.
    """

    def __init__(self, arena: PieceArena, identity: PeerIdentity) -> None:
        self._arena = arena
        self._identity = identity
        self._addresses: Mapping[int, str] = {}  # by shard
        self._channels: dict[tuple[str, int], socket.socket] = {}  # by kind and shard

    def listen(self, host: str) -> str:
        """Begin to receive; returns where. OSError."""
        address, _ = serve(host, self._identity, MAGIC, self._receive)
        return address

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Learn where the other processes listen, by their shards."""
        self._addresses = addresses

    def put(self, parcels: Sequence[tuple[int, Parcel, Sequence[memoryview]]]) -> None:
        """Send pieces to processes of these shards, and wait until all are there.

        One thread at a time may do so for each kind of pieces. MemoryError: one of them has no
        room. WorldError, OSError: it cannot be reached, or received damaged bytes.
        """
        channels = [self._channel(parcel.entry.kind, shard) for shard, parcel, _ in parcels]
        try:
            for channel, (_, parcel, pieces) in zip(channels, parcels, strict=True):
                peer_stream.send_message(channel, parcel)
                for piece in pieces:
                    channel.sendall(piece)
            receipts = [peer_stream.receive_message(channel, Receipt) for channel in channels]
        except (OSError, WorldError):
            self._hang_up(channels)
            raise
        for receipt in receipts:
            if receipt.full:
                raise MemoryError(receipt.problem)
            if receipt.problem:
                self._hang_up(channels)
                raise WorldError(receipt.problem)

    def _hang_up(self, channels: Sequence[socket.socket]) -> None:
        self._channels = {k: each for k, each in self._channels.items() if each not in channels}
        for channel in channels:
            channel.close()

    def _channel(self, kind: str, shard: int) -> socket.socket:
        who = (kind, shard)
        if who not in self._channels:
            address = self._addresses[shard]
            channel = peer_stream.connect(address, self._identity, MAGIC, (shard, 0, 0))
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._channels[who] = channel
        return self._channels[who]

    def _receive(self, channel: socket.socket, _: peer_stream.Purpose) -> None:
        while True:
            parcel = peer_stream.receive_message(channel, Parcel)
            receipt = self._take_in(channel, parcel)
            peer_stream.send_message(channel, receipt)
            if receipt.problem and not receipt.full:
                return  # some of it may be left unread

    def _take_in(self, channel: socket.socket, parcel: Parcel) -> Receipt:
        entry, count = parcel.entry, len(parcel.entry.digests)
        if not 0 < entry.size <= self._arena.budget:
            return Receipt(f"pieces of {entry.size} bytes are none that can be kept")
        try:
            start, room = self._arena.take(entry.size * count)
        except MemoryError as error:
            for _ in range(count):
                peer_stream.receive_exactly(channel, entry.size)  # these bytes are dropped
            return Receipt(str(error), full=True)
        try:
            for index, digest in enumerate(entry.digests):
                piece = room[index * entry.size : (index + 1) * entry.size]
                peer_stream.fill(channel, piece)
                if xxhash.xxh3_128_digest(piece) != digest:
                    self._arena.give_back(start)
                    return Receipt("a piece arrived damaged at another process of the worker")
            self._arena.put(msgspec.structs.replace(entry, start=start), parcel.shelf)
        except BaseException as error:
            self._arena.give_back(start)
            if isinstance(error, MemoryError):
                return Receipt(str(error), full=True)
            raise
        return Receipt()
