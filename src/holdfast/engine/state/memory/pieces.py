"""Cuts bytes into parts, codes parts into pieces, and puts them together again.

Everything that is protected is an **image**: the bytes of several buffers, one after the other. It
is cut into `parts` parts of `data` pieces each, the last of them filled up with zeros. Pieces are
put into the memory of a worker's other nodes, where its processes there receive them.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.core.redundancy import Piece, Redundancy
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.coding.reed_solomon import ReedSolomon
from holdfast.engine.state.memory.arena import PieceArena, PieceEntry, PieceShelf


class Image:
    """Joins several buffers of bytes to one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self.size = sum(map(len, self._buffers))

    def bytes_between(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from `start` to before `stop`, buffer by buffer."""
        found, at = [], 0
        for buffer in self._buffers:
            first, last = max(start - at, 0), min(stop - at, len(buffer))
            if first < last:
                found.append(buffer[first:last])
            at += len(buffer)
            if at >= stop:
                break
        return found


class PieceCoder:
    """Makes pieces of images of `whole` bytes, cut into `parts` parts, and images of pieces."""

    def __init__(self, redundancy: Redundancy, parts: int, whole: int) -> None:
        self.data = redundancy.data
        self.parts = parts
        self.whole = whole
        self.size = max(-(-whole // (parts * self.data)), 1)  # bytes of each piece
        # Copies need no arithmetic.
        self._code = ReedSolomon(self.data, redundancy.parity) if self.data > 1 else None

    def make(self, image: Image, piece: Piece, target: memoryview) -> bytes:
        """Write one piece of an image; returns its digest.

        The digest of data is computed from the image, so that a wrong copy is found.
        """
        if self._code is None or piece.number < self.data:
            number = 0 if self._code is None else piece.number
            return _copy(self._buffers_of(image, piece.part, number), target)
        sources = []
        for number in range(self.data):
            found = self._buffers_of(image, piece.part, number)
            if len(found) != 1 or len(found[0]) != self.size:
                whole = np.empty(self.size, np.uint8)
                _copy(found, whole.data)
                found = [whole.data]
            sources.append(found[0])
        self._code.encode_piece(piece.number, sources, target)
        return xxhash.xxh3_128_digest(target)

    def span(self, piece: Piece) -> tuple[int, int]:
        """Return the first and the last position, in an image, of the bytes that make a piece."""
        one = self._code is None or piece.number < self.data
        number = piece.number if one and self._code is not None else 0
        start = (piece.part * self.data + number) * self.size
        return start, start + self.size * (1 if one else self.data)

    def room(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return room for all data pieces: an image, filled up."""
        return np.empty(self.parts * self.data * self.size, np.uint8)

    def place(self, room: memoryview, piece: Piece) -> memoryview | None:
        """Return the place of a piece in `room`; None for parity, from which data is made."""
        if self._code is not None and piece.number >= self.data:
            return None
        start = (piece.part * self.data + (piece.number if self._code else 0)) * self.size
        return room[start : start + self.size]

    def complete(self, room: memoryview, part: int, there: Mapping[int, memoryview]) -> None:
        """Fill a part's missing data from pieces that are `there`, by number.

        Damaged: there are too few, or they contradict each other.
        """
        missing = [number for number in range(self.data) if number not in there]
        if not missing or self._code is None:
            return
        if len(there) < self.data:
            raise Damaged(f"{len(there)} of the {self.data} pieces that are needed are left")
        right = dict(there)
        if len(there) > self.data:
            wrong = self._code.find_wrong(there)
            right = {number: data for number, data in there.items() if number not in wrong}
            missing += [number for number in wrong if number < self.data]
        if len(right) < self.data:
            raise Damaged(f"{len(right)} of the {self.data} pieces that are needed are right")
        first = part * self.data
        places = {n: room[(first + n) * self.size : (first + n + 1) * self.size] for n in missing}
        self._code.rebuild(right, places)

    def _buffers_of(self, image: Image, part: int, number: int) -> list[memoryview]:
        start = (part * self.data + number) * self.size
        return image.bytes_between(start, start + self.size)


def _copy(sources: Sequence[memoryview], target: memoryview) -> bytes:
    """Copy buffers one after the other, fill up with zeros, and return the digest of both."""
    digest, at = xxhash.xxh3_128(), 0
    room = np.frombuffer(target, np.uint8)
    for source in sources:
        digest.update(source)
        room[at : at + len(source)] = np.frombuffer(
            source, np.uint8
        )  # without the interpreter's lock
        at += len(source)
    if at < len(target):
        digest.update(bytes(len(target) - at))
        room[at:] = 0
    return digest.digest()


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

    What a process receives it writes into its own file, and answers: so the sender knows that a
    piece has arrived before it continues. The processes of a worker live and die together, so this
    code handles the loss of none.

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
