"""Keeps a checksum of each row, so that memory which has changed by itself is noticed.

A server's memory holds rows for months, and a flipped bit in one of them would go into a model
unseen. So a row is compared with its checksum before it is read, updated or copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holdfast.core.servers.placement import SHARDS
from holdfast.servers.reserved_arrays import ReservedArrays

CHECKED_AT_ONCE = 1 << 16  # rows


class RowChecksums:
    """Keeps checksums of the rows of some arrays, which have a row for each place.

    `arrays`: [places, width] each, of numbers of 4 or 8 bytes; `memory`: made them. A checksum is
    the sum of a row's 32-bit words, each times an odd number of its own, modulo 2^32: a single
    flipped bit always changes it.
    """

    def __init__(self, arrays: Sequence[torch.Tensor], memory: ReservedArrays) -> None:
        self._words = [array.view(torch.int32) for array in arrays]
        self._memory = memory
        width = sum(words.shape[1] for words in self._words)
        factors = torch.arange(width, dtype=torch.int64) * 0x9E3779B1 + 0x85EBCA6B
        self._factors = (factors | 1).to(torch.int32)
        self._sums = memory.make(len(self._words[0]), 0, torch.int32)

    def seal(self, places: torch.Tensor | range) -> None:
        """Take the rows at these places as they are now for right."""
        if isinstance(places, torch.Tensor):
            self.seal_copies(places, [words.index_select(0, places) for words in self._words])
            return
        for part in _split(places):
            self._sums[part] = self._sum_rows([words[part] for words in self._words])

    def seal_copies(self, places: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Take the rows at these places for right if they are these, [places, width] each."""
        self._sums[places] = self._sum_rows([part.view(torch.int32) for part in parts])

    def find_differing(self, places: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return for each of these places whether its rows, copied to `parts`, are damaged."""
        found = self._sum_rows([part.view(torch.int32) for part in parts])
        return found != self._sums.index_select(0, places)

    def find_damaged(self, places: torch.Tensor | range) -> torch.Tensor:
        """Return those of these places whose rows are not as they were sealed."""
        if isinstance(places, torch.Tensor):
            parts = [words.index_select(0, places) for words in self._words]
            return places[self.find_differing(places, parts)]
        damaged = []
        for part in _split(places):
            found = self._sum_rows([words[part] for words in self._words])
            damaged.append((found != self._sums[part]).nonzero().flatten() + part.start)
        return torch.cat(damaged) if damaged else torch.empty(0, dtype=torch.int64)

    def release(self, places: range) -> None:
        """Free the memory of these rows and their checksums, which nobody may read afterwards."""
        self._memory.release([*self._words, self._sums], places)

    def _sum_rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the checksums [n] of rows, from their words [n, width] in each array."""
        found = torch.zeros(len(parts[0]), dtype=torch.int32)
        at = 0
        for words in parts:
            factors = self._factors[at : at + words.shape[1]]
            found += (words * factors).sum(1, dtype=torch.int32)
            at += words.shape[1]
        return found


def _split(places: range) -> list[slice]:
    starts = range(places.start, places.stop, CHECKED_AT_ONCE)
    return [slice(start, min(start + CHECKED_AT_ONCE, places.stop)) for start in starts]


class ShardChecksums:
    """Keeps the checksums of one table's arrays, in sets that are looked at together.

    `sets`: by name, arrays [places, width] with the places of all shards, one after the other.
    """

    def __init__(self, sets: Mapping[str, Sequence[torch.Tensor]], memory: ReservedArrays) -> None:
        used = {name: arrays for name, arrays in sets.items() if arrays and len(arrays[0])}
        self._sets = {name: RowChecksums(arrays, memory) for name, arrays in used.items()}
        self._sizes = {name: len(arrays[0]) // SHARDS for name, arrays in used.items()}

    def seal(self, places: torch.Tensor, *names: str) -> None:
        """Take these places of some sets as they are now for right."""
        for name in names:
            if name in self._sets:
                self._sets[name].seal(places)

    def seal_shard(self, shard: int) -> None:
        """Take all of a shard as it is now for right."""
        for name, each in self._sets.items():
            first = shard * self._sizes[name]
            each.seal(range(first, first + self._sizes[name]))

    def release(self, shard: int) -> None:
        """Free the memory of a shard and its checksums, which nobody may read afterwards."""
        for name, each in self._sets.items():
            first = shard * self._sizes[name]
            each.release(range(first, first + self._sizes[name]))

    def find_damaged(self, places: torch.Tensor, *names: str) -> set[int]:
        """Return the shards in which these places of some sets have changed by themselves."""
        found: set[int] = set()
        for name in names:
            if name in self._sets:
                damaged = self._sets[name].find_damaged(places)
                found |= set((damaged // self._sizes[name]).tolist())
        return found

    def is_damaged(self, shard: int, part: range) -> bool:
        """Return whether anything in this part of a shard's places has changed by itself."""
        for name, each in self._sets.items():
            size = self._sizes[name]
            first = shard * size
            places = range(first + part.start, first + min(part.stop, size))
            if len(each.find_damaged(places)):
                return True
        return False
