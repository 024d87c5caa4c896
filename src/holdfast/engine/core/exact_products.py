"""Defines matrix products whose every correct result has the same bits, with their digests.

The entries are integers so small that every partial sum is an integer which the format holds
exactly (below 2^24 for float32, up to 256 for bfloat16). So nothing is ever rounded, and the order
of the additions, fused multiply-add, threads, vector width, TF32 and tensor cores cannot show in
the result: a machine that gets another digest computes wrongly. The caller brings the arithmetic;
here are only bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactProduct:
    """Describes left [rows, inner] times right [inner, columns], of entries up to +-entry_max."""

    name: str
    rows: int
    inner: int
    columns: int
    entry_max: int
    #: The digest of the result, as little-endian int32, row by row.
    digest: str

    @property
    def sum_max(self) -> int:
        """Return a bound on every partial sum, in any order."""
        return self.inner * self.entry_max**2

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inner * self.columns

    def left_entries(self) -> bytes:
        """Return the left matrix as int8, row by row."""
        return self._entries("left", self.rows * self.inner)

    def right_entries(self) -> bytes:
        """Return the right matrix as int8, row by row."""
        return self._entries("right", self.inner * self.columns)

    def _entries(self, side: str, count: int) -> bytes:
        seed = f"holdfast exact product {self.name} {side}".encode()
        span = 2 * self.entry_max + 1
        table = bytes((byte % span - self.entry_max) % 256 for byte in range(256))
        return hashlib.shake_128(seed).digest(count).translate(table)


# 8-bit entries, exact in float32, also when the inputs are cut to TF32, bfloat16 or float16.
WIDE = ExactProduct(
    name="wide",
    rows=1024,
    inner=1024,
    columns=1024,
    entry_max=127,
    digest="8404be1338ca2c29a21b9db04866b794",
)
# -1, 0 and 1: exact even where sums are kept or returned in bfloat16.
NARROW = ExactProduct(
    name="narrow",
    rows=1024,
    inner=256,
    columns=1024,
    entry_max=1,
    digest="ed43179000a6a8416c2a386b58bb9a40",
)


def digest_of(result: bytes) -> str:
    """Digest a result, given as little-endian int32, row by row."""
    return hashlib.blake2b(result, digest_size=16).hexdigest()
