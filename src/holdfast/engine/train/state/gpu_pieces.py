"""Cuts and codes pieces of tensors on the GPU where they lie, so that only pieces are copied.

The pieces equal those of coding/reed_solomon.py, to the byte. A product with a constant of GF(2^8)
is linear over bits, so it needs only shifts and exclusive ors, on eight bytes at a time. From the
highest bit of the coefficients down, the sum so far is doubled in the field, and then the data
whose coefficients have the bit are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.engine.core.errors import require
from holdfast.engine.core.redundancy import Piece
from holdfast.engine.state.coding.reed_solomon import POLYNOMIAL, ReedSolomon
from holdfast.engine.state.memory.pieces import PieceCoder

WORD_BYTES = 8
HIGH_BITS = 0x0101010101010101  # each byte's highest bit, shifted to its lowest place
NOT_LOWEST = -HIGH_BITS - 1  # a word with all bits but the lowest one of each byte


class TensorCode:
    """Encodes pieces with one (k, m) code. UserError without ISA-L, which gives the matrix."""

    def __init__(self, k: int, m: int) -> None:
        self.k = k
        code = ReedSolomon(k, m)
        self._rows = [code.coefficients(number) for number in range(k + m)]

    def make(self, number: int, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one piece, of data or parity, from all k of `data`.

        All are flat int64 tensors on one device, of the same length, eight bytes to a word.
        """
        require(len(data) == self.k, f"{len(data)} pieces of data, where {self.k} belong")
        if number < self.k:
            return data[number].clone()
        row = self._rows[number]
        found = torch.zeros_like(data[0])
        for bit in range(7, -1, -1):
            found = _double(found) if bit < 7 else found
            for coefficient, piece in zip(row, data, strict=True):
                if coefficient >> bit & 1:
                    found.bitwise_xor_(piece)
        return found


def _double(words: torch.Tensor) -> torch.Tensor:
    """Multiply each byte by 2 in the field."""
    over = words.bitwise_right_shift(7).bitwise_and_(HIGH_BITS)
    doubled = words.bitwise_left_shift(1).bitwise_and_(NOT_LOWEST)
    return doubled.bitwise_xor_(over.mul_(POLYNOMIAL & 0xFF))


class DeviceImage:
    """Presents several tensors' bytes as one, as memory/pieces.py does with buffers of the host."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        self._device = device
        self.size = sum(flat.numel() for flat in self._flat)

    def bytes_from(self, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes from `start` on, filled up with zeros: [size] uint8."""
        found = torch.zeros(size, dtype=torch.uint8, device=self._device)
        at = 0
        for flat in self._flat:
            first, last = max(start - at, 0), min(start + size - at, flat.numel())
            if first < last:
                found[at + first - start : at + last - start].copy_(flat[first:last])
            at += flat.numel()
        return found

    def make(
        self, coder: PieceCoder, code: TensorCode | None, piece: Piece, room: memoryview
    ) -> bytes:
        """Write one piece to the host, as PieceCoder.make does; returns its digest."""
        size, first = coder.size, piece.part * coder.data * coder.size
        if code is None or piece.number < coder.data:
            number = 0 if code is None else piece.number
            found = self.bytes_from(first + number * size, size)
        else:
            padded = -(-size // WORD_BYTES) * WORD_BYTES
            data = []
            for number in range(coder.data):
                words = torch.zeros(padded, dtype=torch.uint8, device=self._device)
                words[:size] = self.bytes_from(first + number * size, size)
                data.append(words.view(torch.int64))
            found = code.make(piece.number, data).view(torch.uint8)[:size]
        torch.frombuffer(room, dtype=torch.uint8, count=size).copy_(found)
        return xxhash.xxh3_128_digest(room[:size])
