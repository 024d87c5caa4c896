"""Cuts bytes into parts, codes parts into pieces, and puts them together again.

Everything that is protected is an **image**: the bytes of several buffers, one after the other. It
is cut into `parts` parts of `data` pieces each, the last of them filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.redundancy import Piece, Redundancy
from holdfast.engine.state.coding.reed_solomon import ReedSolomon


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
