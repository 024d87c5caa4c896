"""Computes Reed-Solomon codes: of k data pieces and m parity pieces, any k restore the rest.

Intel's ISA-L does the arithmetic on whole buffers, where speed counts, in GF(2^8) with a Cauchy
matrix, whose square submatrices are all invertible. The library comes with the PyECLib wheel, or is
the system's libisal. It is called without copying, and without Python's lock. Small matrices are
computed here, by table, in the field of ISA-L: polynomials over two elements modulo
x^8 + x^4 + x^3 + x^2 + 1.

Pieces have numbers, data first. With more than k of them, wrong ones are found (Metzner and
Kapturowski, "A General Decoding Technique Applicable to Replicated File Disagreement Location and
Concatenated Code Decoding", IEEE Transactions on Information Theory 36, 1990): the differences
between pieces and their values computed from the rest span a space that contains just the columns
of wrong pieces.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.engine.core.errors import Damaged, UserError, require

POLYNOMIAL = 0x11D
Bytes = npt.NDArray[np.uint8]
PIECES_MAX = 256  # the field has no more elements
BLOCK_BYTES = 1 << 18  # bytes of each piece, compared at a time
PLANS_MAX = 64  # repairs are kept, as the next block may lack the same pieces
GUESSES_MAX = 20_000  # sets of pieces that may be wrong


@functools.lru_cache(maxsize=1)
def products() -> Bytes:
    """Return the table of all products, 256 x 256."""
    powers, value = np.zeros(510, np.uint8), 1
    logarithm = np.zeros(256, np.int64)
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithm[value] = exponent
        value <<= 1
        value ^= POLYNOMIAL if value & 0x100 else 0
    table: Any = powers[logarithm[:, None] + logarithm[None, :]]
    table[0, :] = table[:, 0] = 0
    return np.asarray(table, np.uint8)


def inverse(a: int) -> int:
    """Return the factor whose product with `a`, which is not 0, is 1."""
    return int(np.flatnonzero(products()[a] == 1)[0])


def multiply(left: Bytes, right: Bytes) -> Bytes:
    """Multiply an (n, k) matrix by a (k, m) one; m may be millions."""
    table = products()
    found = np.zeros((left.shape[0], right.shape[1]), np.uint8)
    for i, row in enumerate(left):
        for factor, source in zip(row, right, strict=True):
            if factor == 1:
                found[i] ^= source
            elif factor:
                found[i] ^= table[factor][source]
    return found


def left_null_space(columns: Bytes) -> Bytes:
    """Return independent rows that are orthogonal to all columns of a (k, n) matrix.

    There are k minus its rank: with the identity next to it, the matrix is brought to echelon form.
    """
    table = products()
    k, n = columns.shape
    work = np.concatenate([columns, np.eye(k, dtype=np.uint8)], axis=1)
    rank = 0
    for column in range(n):
        pivots = np.flatnonzero(work[rank:, column])
        if not len(pivots):
            continue
        first = rank + int(pivots[0])
        work[[rank, first]] = work[[first, rank]]
        work[rank] = table[inverse(int(work[rank, column]))][work[rank]]
        for row in range(rank + 1, k):
            work[row] ^= table[work[row, column]][work[rank]]
        rank += 1
        if rank == k:
            break
    return work[rank:, n:]


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
        self._plans: dict[
            tuple[int, ...], tuple[int, Any]
        ] = {}  # repairs by the pieces that are there

    def encode(self, data: Sequence[memoryview], parity: Sequence[memoryview]) -> None:
        """Fill the m buffers of `parity` from the k of `data`, all of the same length."""
        require(len(data) == self.k and len(parity) == self.m, "another number of pieces")
        self._run(self._encoding, data, parity)

    def encode_piece(self, number: int, data: Sequence[memoryview], piece: memoryview) -> None:
        """Fill one piece, of data or parity, from all k of `data`."""
        require(len(data) == self.k and 0 <= number < self.k + self.m, "another number of pieces")
        if number < self.k:
            require(len(piece) == len(data[number]), "pieces of different lengths")
            piece[:] = data[number]
        else:
            self._run(self._tables(self._generator(number), 1), data, [piece])

    def coefficients(self, number: int) -> bytes:
        """Return the factor of each piece of data, in GF(2^8), for the sum that is this piece."""
        require(0 <= number < self.k + self.m, "another number of pieces")
        return self._generator(number)

    def update(self, number: int, delta: memoryview, parity: Sequence[memoryview]) -> None:
        """Bring all parity up to date after a change of data piece `number`.

        `delta`: the old piece XOR the new one.
        """
        require(0 <= number < self.k and len(parity) == self.m, "another number of pieces")
        require(all(len(piece) == len(delta) for piece in parity), "pieces of different lengths")
        if len(delta) and self.m:
            source, target = _pointers([delta])[0], _pointers(parity)
            _, table = self._encoding
            self._isal.ec_encode_data_update(
                len(delta), self.k, self.m, number, table, ctypes.c_void_p(source), target
            )

    def rebuild(self, there: Mapping[int, memoryview], wanted: Mapping[int, memoryview]) -> None:
        """Fill the `wanted` pieces from any k that are `there`, both by number."""
        used = sorted(there)[: self.k]
        lost = sorted(wanted)
        plan = (*used, -1, *lost)
        tables = self._plans.get(plan)
        if tables is None:
            tables = self._tables(self._rows_from(used, lost), len(lost))
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            self._plans[plan] = tables
        self._run(tables, [there[i] for i in used], [wanted[i] for i in lost])

    def find_wrong(self, there: Mapping[int, memoryview]) -> tuple[int, ...]:
        """Find the pieces that do not fit the rest, by number.

        With n more pieces than the k that are needed, up to n / 2 wrong ones are found whatever
        their errors are, and up to n - 1 if these are unrelated. Damaged: too many are wrong to
        find out which.
        """
        numbers = sorted(there)
        used, spare = numbers[: self.k], numbers[self.k :]
        parity_check = np.concatenate(
            [
                np.frombuffer(self._rows_from(used, spare), np.uint8).reshape(len(spare), self.k),
                np.eye(len(spare), dtype=np.uint8),
            ],
            axis=1,
        )
        orthogonal = np.eye(len(spare), dtype=np.uint8)  # to all differences seen so far
        seen = np.zeros((len(spare), 0), np.uint8)
        for differences in self._differences(there, used, spare):
            while len(orthogonal):
                new = np.flatnonzero(multiply(orthogonal, differences).any(axis=0))
                if not len(new):
                    break
                seen = np.concatenate([seen, differences[:, new[:1]]], axis=1)
                orthogonal = left_null_space(seen)
        wrong = _span(parity_check, seen, orthogonal)
        if wrong is None:
            raise Damaged(
                f"{len(numbers)} pieces ({self.k} are enough) contradict each other in too many "
                "ways: the wrong ones cannot be told from the right ones"
            )
        return tuple(numbers[i] for i in wrong)

    def _differences(
        self, there: Mapping[int, memoryview], used: Sequence[int], spare: Sequence[int]
    ) -> Iterator[Bytes]:
        """Yield by blocks the XOR of spare pieces and their right values, where these differ."""
        tables = self._tables(self._rows_from(used, spare), len(spare))
        size = len(there[used[0]])
        require(all(len(piece) == size for piece in there.values()), "pieces of different lengths")
        for start in range(0, size, BLOCK_BYTES):
            block = slice(start, min(start + BLOCK_BYTES, size))
            should = np.zeros((len(spare), block.stop - start), np.uint8)
            rows = [row.data for row in should]
            self._run(tables, [there[i][block] for i in used], rows)
            for row, number in zip(should, spare, strict=True):
                row ^= np.frombuffer(there[number][block], np.uint8)
            differing = np.flatnonzero(should.any(axis=0))
            if len(differing):
                yield np.ascontiguousarray(should[:, differing])

    def _rows_from(self, used: Sequence[int], wanted: Sequence[int]) -> bytes:
        """Return the coefficients that give the wanted pieces from k known ones."""
        require(len(used) == self.k, f"{len(used)} pieces are too few: {self.k} are needed")
        rows = b"".join(map(self._generator, used))
        square, inverse = ctypes.create_string_buffer(rows, self.k**2), _buffer(self.k**2)
        failed = self._isal.gf_invert_matrix(square, inverse, self.k)
        require(failed == 0, f"pieces {used} do not give the rest")
        matrix = np.frombuffer(inverse.raw, np.uint8).reshape(self.k, self.k)
        needed = np.frombuffer(b"".join(map(self._generator, wanted)), np.uint8)
        return multiply(needed.reshape(len(wanted), self.k), matrix).tobytes()

    def _generator(self, piece: int) -> bytes:
        """Return the coefficients that give a piece from the data."""
        return bytes(self._matrix.raw[piece * self.k : (piece + 1) * self.k])

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
        require(not any(piece.readonly for piece in target), "a piece to be filled is read-only")
        if not count or not size:
            return
        self._isal.ec_encode_data(size, self.k, count, table, _pointers(source), _pointers(target))


def _span(columns: Bytes, seen: Bytes, orthogonal: Bytes) -> tuple[int, ...] | None:
    """Find the fewest columns that span all errors; None if that leaves no piece to check.

    `orthogonal`: rows that are orthogonal to all errors.
    """
    rank = seen.shape[1]
    if not rank:
        return ()
    if not len(orthogonal):
        return None
    found = np.flatnonzero(~multiply(orthogonal, columns).any(axis=0))
    if len(found) == rank:
        return tuple(map(int, found))
    # Errors depend on each other: more pieces are wrong than their differences have dimensions.
    count = columns.shape[1]
    for size in range(rank + 1, len(seen) // 2 + 1):
        if math.comb(count, size) > GUESSES_MAX:
            return None
        for guess in itertools.combinations(range(count), size):
            others = left_null_space(np.ascontiguousarray(columns[:, guess]))
            if not multiply(others, seen).any():
                return guess
    return None


def _buffer(size: int) -> Any:
    return ctypes.create_string_buffer(size)


def _pointers(pieces: Sequence[memoryview]) -> Any:
    addresses = [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces]  # or read-only
    return (ctypes.c_void_p * len(pieces))(*addresses)
