"""Describes a table to whoever keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.servers.placement import SHARDS
from holdfast.tables.row_values import hash_keys

# A full table takes the rows from the keys that were used least recently, or least often.
AGE, FREQUENCY = "age", "frequency"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """Describes how keys of a table get rows of their own, and lose them.

    `capacity`: how many keys have one at a time, about. `admit_after`: how many updates use a key
    before it gets one. `evict`: AGE or FREQUENCY.
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
        """Return how many rows each shard has room for."""
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
