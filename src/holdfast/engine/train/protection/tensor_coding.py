"""Computes Reed-Solomon pieces of tensors on the device where they lie, a GPU or the CPU.

The code equals that of coding/reed_solomon.py, to the byte. A product with a constant of GF(2^8) is
linear over bits, so it needs only shifts and exclusive ors, on eight bytes at a time. From the
highest bit of the coefficients down, the sum so far is doubled in the field, and then the data
whose coefficients have the bit are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.engine.core.errors import require
from holdfast.engine.state.coding.reed_solomon import POLYNOMIAL, ReedSolomon

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
