"""Describes a table for all modules that keep its rows: its size, its rules, and the rows' first
values.

A row's first value follows from the table's seed and the row's key alone. So it is the same in
whatever process it is made, and whichever rows were made before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.tables.core.placement import SHARDS

_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BLOCK = 1 << 20  # numbers made at a time
# A full table takes the rows from the keys that were used least recently, or least often.
AGE, FREQUENCY = "age", "frequency"


def seed_of_table(seed: int, name: str) -> int:
    """Hash the job's seed and a table's name to 64 bits (blake2b)."""
    data = (seed & _MASK).to_bytes(8, "little") + name.encode()
    found = hashlib.blake2b(data, digest_size=8, person=b"holdfast-tables").digest()
    return int.from_bytes(found, "little")


def hash_keys(keys: torch.Tensor) -> np.ndarray:
    """Return 64 well mixed bits [n] uint64 for each key [n] int64 (the finalizer of SplitMix64)."""
    return _mix_bits(keys.numpy().view(np.uint64))


def fill_rows(rows: torch.Tensor, keys: np.ndarray, seed: int, low: float, high: float) -> None:
    """Fill the rows [rows, dim] of these keys with uniform numbers from `low` up to `high`.

    `keys`: [rows] uint64.

    Number j of row k is the (k * dim + j)th of the generator SplitMix64 (Steele, Lea, Flood,
    "Fast splittable pseudorandom number generators", 2014), cut to 24 bits.
    """
    count, dim = rows.shape
    each = max(_BLOCK // max(dim, 1), 1)
    columns = np.arange(dim, dtype=np.uint64)
    for start in range(0, count, each):
        part = rows[start : start + each]
        places = keys[start : start + each, None] * np.uint64(dim) + columns
        unit = _mix(places * np.uint64(_GAMMA) + np.uint64((seed + _GAMMA) & _MASK))
        numbers = torch.from_numpy(unit).to(part.dtype).mul_(high - low).add_(low)
        part.copy_(numbers.view_as(part))


def _mix(x: np.ndarray) -> np.ndarray:
    """Return numbers from 0 up to 1 as float32, from the states of SplitMix64."""
    return (_mix_bits(x) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix_bits(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """Describes how keys of a table get rows of their own, and lose them.

    `capacity`: how many keys have one at a time, about. `admit_after`: how many updates use a key
    before it gets one. `evict`: which keys lose theirs when there is no room, those used least
    recently ("age") or least often ("frequency").

        words = Embedding(None, 8, name="words", keys=KeyRules(capacity=1000, evict="frequency"))
    """

    capacity: int
    admit_after: int = 1
    evict: str = AGE


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Describes a table of `count` rows of `dim` numbers, or of rows for any keys (`keyed`).

    `seed`: of the rows' first values, which are uniform in `limits`. `padding`: the row, or key,
    whose first value is 0.
    """

    name: str
    count: int
    dim: int
    seed: int
    limits: tuple[float, float]
    padding: int | None = None
    keyed: KeyRules | None = None

    @property
    def shard_rows(self) -> int:
        """Return the number of rows for which each shard has room."""
        count = self.count if self.keyed is None else self.keyed.capacity
        return -(-count // SHARDS)

    def shards_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the shard [n] of each key [n]. Numbered rows take turns, other keys are mixed."""
        if self.keyed is None:
            return keys % SHARDS
        return torch.from_numpy((hash_keys(keys) % SHARDS).astype("int64"))

    def are_in(self, shards: Sequence[int], keys: torch.Tensor) -> torch.Tensor:
        """Return for each key [n] whether it is in one of these shards."""
        return mark_shards(shards)[self.shards_of(keys)]


def mark_shards(shards: Sequence[int]) -> torch.Tensor:
    """Return for each shard of a table [SHARDS] whether it is one of these."""
    chosen = torch.zeros(SHARDS, dtype=torch.bool)
    chosen[list(shards)] = True
    return chosen
