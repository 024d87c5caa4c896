"""Computes Reed-Solomon codes: of k data pieces and m parity pieces, any k restore the rest.

Intel's ISA-L does the arithmetic, in GF(2^8) with a Cauchy matrix, every square submatrix of which
is invertible. The library comes with the PyECLib wheel, or is the system's libisal. It is called
without copying, and Python's lock is released meanwhile.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError, require

PIECES_MAX = 256  # the field has no more elements


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """Load ISA-L; UserError if it is not installed."""
    found: list[str] = []
    package = importlib.util.find_spec("pyeclib")
    for place in package.submodule_search_locations or () if package else ():
        found += map(str, Path(place).parent.glob("pyeclib.libs/libisal*"))
    system = ctypes.util.find_library("isal")
    for name in [*found, *([system] if system else [])]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UserError("erasure coding needs ISA-L: pip install 'holdfast[ec]', or install libisal2")


class ReedSolomon:
    """Encodes and rebuilds with one (k, m) code.

    The methods may be called from several threads. UserError without ISA-L.
    """

    def __init__(self, k: int, m: int) -> None:
        if k < 1 or m < 0 or k + m > PIECES_MAX:
            raise UserError(f"{k}+{m} pieces: at least 1 of data, and {PIECES_MAX} in all at most")
        self.k = k
        self.m = m
        self._isal = _library()
        self._matrix = ctypes.create_string_buffer((k + m) * k)
        self._isal.gf_gen_cauchy1_matrix(self._matrix, k + m, k)
        self._encoding = self._tables(bytes(self._matrix.raw[k * k :]), m)

    def encode(self, data: Sequence[memoryview], parity: Sequence[memoryview]) -> None:
        """Fill the m buffers of `parity` from the k of `data`: writable, all of the same length."""
        require(len(data) == self.k and len(parity) == self.m, "another number of pieces")
        self._run(self._encoding, data, parity)

    def rebuild(self, there: Mapping[int, memoryview], wanted: Mapping[int, memoryview]) -> None:
        """Fill the `wanted` pieces from any k that are `there`, both by number (data first)."""
        used = sorted(there)[: self.k]
        require(len(used) == self.k, f"{len(there)} pieces are too few: {self.k} are needed")
        k = self.k
        rows = b"".join(self._matrix.raw[i * k : (i + 1) * k] for i in used)
        square, inverse = ctypes.create_string_buffer(rows, k * k), _buffer(k * k)
        failed = self._isal.gf_invert_matrix(square, inverse, k)
        require(failed == 0, f"pieces {used} do not give the rest")
        lost = sorted(wanted)
        needed = b"".join(self._row(i, inverse.raw) for i in lost)
        tables = self._tables(needed, len(lost))
        self._run(tables, [there[i] for i in used], [wanted[i] for i in lost])

    def _row(self, piece: int, inverse: bytes) -> bytes:
        """Return the coefficients that give this piece from the pieces in use."""
        k = self.k
        if piece < k:
            return inverse[piece * k : (piece + 1) * k]
        mine = self._matrix.raw[piece * k : (piece + 1) * k]
        row = bytearray(k)
        for j in range(k):
            for i in range(k):
                row[j] ^= self._multiply(mine[i], inverse[i * k + j])
        return bytes(row)

    def _multiply(self, a: int, b: int) -> int:
        return int(self._isal.gf_mul(ctypes.c_ubyte(a), ctypes.c_ubyte(b))) & 0xFF

    def _tables(self, rows: bytes, count: int) -> tuple[int, Any]:
        tables = _buffer(max(32 * self.k * count, 1))
        self._isal.ec_init_tables(self.k, count, ctypes.create_string_buffer(rows), tables)
        return count, tables

    def _run(
        self, tables: tuple[int, Any], source: Sequence[memoryview], target: Sequence[memoryview]
    ) -> None:
        count, table = tables
        size = len(source[0])
        require(all(len(p) == size for p in (*source, *target)), "pieces of different lengths")
        if not count or not size:
            return
        self._isal.ec_encode_data(size, self.k, count, table, _pointers(source), _pointers(target))


def _buffer(size: int) -> Any:
    return ctypes.create_string_buffer(size)


def _pointers(pieces: Sequence[memoryview]) -> Any:
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in pieces]
    return (ctypes.c_void_p * len(pieces))(*addresses)
