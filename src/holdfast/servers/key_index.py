"""Finds where the row of each key is, for whole arrays of keys.

The index only points: an entry that is out of date does no harm, since `find` compares with the key
that is at the place now. It is no part of a table's state and can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.core.servers.placement import SHARDS
from holdfast.servers.row_values import hash_keys

RECENT_MIN = 1 << 12  # keys added one update after another, before some are sorted in
RECENT_SHARE = 8
SHARD_BITS = SHARDS.bit_length() - 1
CODE_BITS = 64 - SHARD_BITS  # of a code, below those that name the shard


class KeyIndex:
    """Points from keys to places. `keys` [places] and `uses` [places], int64, are the truth.

    It is empty until `replace`. A place without uses has no key.
    """

    def __init__(self, keys: torch.Tensor, uses: torch.Tensor) -> None:
        self._keys, self._uses = keys, uses
        self._base = self._recent = SortedKeys(keys[:0], keys[:0])

    def replace(self, places: Mapping[int, torch.Tensor]) -> None:
        """Point to the keys at these places [n] of some shards, and to no others there."""
        edges = [0, *self._base.find_edges(), len(self._base.codes)]
        codes, found = [], []
        for shard in range(SHARDS):
            if shard in places:
                mine = sort_keys(self._keys[places[shard]], places[shard])
                # A key that is not of the shard is there because memory has changed by itself.
                mine = mine.pick(find_shards(mine.codes) == shard)
                codes.append(mine.codes)
                found.append(mine.places)
            else:
                here = slice(edges[shard], edges[shard + 1])
                codes.append(self._base.codes[here])
                found.append(self._base.places[here])
        self._base = SortedKeys(torch.cat(codes), torch.cat(found))
        is_replaced = torch.zeros(SHARDS, dtype=torch.bool)
        is_replaced[list(places)] = True
        self._recent = self._recent.pick(~is_replaced[find_shards(self._recent.codes)])

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n], -1 where it has none."""
        codes, found = encode(keys), torch.full_like(keys, -1)
        for part in (self._base, self._recent):
            if len(part.codes):
                places = part.places[part.locate(codes)]
                there = (self._keys[places] == keys) & (self._uses[places] > 0)
                found = torch.where(there, places, found)
        return found

    def list_places(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the places [m] that these keys have or had, as far as is known here.

        A key that has one, but is not found there, may have changed by itself.
        """
        codes, found = encode(keys), [keys[:0]]
        for part in (self._base, self._recent):
            if len(part.codes):
                at = part.locate(codes)
                found.append(part.places[at[part.codes[at] == codes]])
        return torch.cat(found)

    def add(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Record the places [n] of keys [n] that had none."""
        new = sort_keys(keys, places)
        kept = self._recent.pick(~torch.isin(self._recent.codes, new.codes))
        self._recent = kept.merge(new)

    def find_crowded(self) -> int | None:
        """Return the shard to `replace`, as it has the most recent keys, if there are too many."""
        recent, limit = self._recent.codes, max(RECENT_MIN, len(self._base.codes) // RECENT_SHARE)
        if len(recent) <= limit:
            return None
        return int(torch.bincount(find_shards(recent), minlength=SHARDS).argmax())


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """Has the codes [n] of keys, each once, in growing order, and a place [n] for each."""

    codes: torch.Tensor
    places: torch.Tensor

    def locate(self, codes: torch.Tensor) -> torch.Tensor:
        """Return where each of these codes is; anything for one that is not here. Not if empty."""
        return torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n], -1 for one that is not here."""
        codes = encode(keys)
        if not len(self.codes):
            return torch.full_like(keys, -1)
        at = self.locate(codes)
        return torch.where(self.codes[at] == codes, self.places[at], -1)

    def find_edges(self) -> list[int]:
        """Return where each shard but the first begins."""
        firsts = np.arange(1, SHARDS, dtype=np.uint64) << np.uint64(CODE_BITS)
        return torch.searchsorted(self.codes, _sign(firsts)).tolist()

    def pick(self, mask: torch.Tensor) -> SortedKeys:
        """Return the keys where `mask` [n] is true."""
        return self if bool(mask.all()) else SortedKeys(self.codes[mask], self.places[mask])

    def merge(self, other: SortedKeys) -> SortedKeys:
        """Return the keys of both, which have none in common, in less time than sorting takes."""
        if not len(self.codes) or not len(other.codes):
            return other if len(other.codes) else self
        at = torch.searchsorted(self.codes, other.codes) + torch.arange(len(other.codes))
        mine = torch.ones(len(self.codes) + len(other.codes), dtype=torch.bool)
        mine[at] = False
        codes, places = (torch.empty(len(mine), dtype=torch.int64) for _ in range(2))
        codes[at], places[at] = other.codes, other.places
        codes[mine], places[mine] = self.codes, self.places
        return SortedKeys(codes, places)


def sort_keys(keys: torch.Tensor, places: torch.Tensor) -> SortedKeys:
    """Sort keys [n] by their codes, with the place [n] of each."""
    codes, order = encode(keys).sort()
    return SortedKeys(codes, places[order])


def encode(keys: torch.Tensor) -> torch.Tensor:
    """Return the code [n] int64 of each key [n]: its own, and those of one shard are neighbours."""
    hashes = hash_keys(keys)  # its low bits name the shard
    return _sign((hashes >> np.uint64(SHARD_BITS)) | (hashes << np.uint64(CODE_BITS)))


def find_shards(codes: torch.Tensor) -> torch.Tensor:
    """Return the shard [n] of each code [n]."""
    return (codes >> CODE_BITS) + SHARDS // 2


def _sign(codes: np.ndarray) -> torch.Tensor:
    """Return unsigned numbers as signed ones that are in the same order."""
    return torch.from_numpy((codes ^ np.uint64(1 << 63)).view(np.int64))
