"""Computes in GF(2^8), the field of the erasure codes: small matrices, and rows of bytes by table.

The field is the one of ISA-L: polynomials over two elements modulo x^8 + x^4 + x^3 + x^2 + 1. ISA-L
itself works on whole buffers, where speed counts (reed_solomon.py).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

POLYNOMIAL = 0x11D
Bytes = npt.NDArray[np.uint8]


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
    """Return what gives 1 when it is multiplied by `a`, which is not 0."""
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

    There are k minus its rank: with the identity beside it, the matrix is brought to echelon form.
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
