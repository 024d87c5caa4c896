"""Finds where the row of each key is, for whole arrays of keys.

The index only points: `find` compares with the key that is at the place now, and if they differ,
memory has changed by itself. It is no part of a table's state and can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.engine.core.servers.placement import SHARDS
from holdfast.tables.table_shape import hash_keys

RECENT_MIN = 1 << 12  # keys added one update after another, before some are sorted in
RECENT_SHARE = 8
SHARD_BITS = SHARDS.bit_length() - 1
#: Bits of a code, below the bits of the shard.
CODE_BITS = 64 - SHARD_BITS


class KeyIndex:
    """Points from keys to places. `keys` [places] and `uses` [places], int64, are the truth.

    It is empty until `replace`. A place without uses has no key.
    """

    def __init__(self, keys: torch.Tensor, uses: torch.Tensor) -> None:
        self._keys, self._uses = keys, uses
        self._base = self._recent = SortedKeys(keys[:0], keys[:0])

    def replace(self, places: Mapping[int, torch.Tensor]) -> None:
        """Point to the keys at these places [n] of some shards, and drop all earlier ones there."""
        found = {shard: sort_keys(self._keys[each], each) for shard, each in places.items()}
        # A key that is not of the shard is there because memory has changed by itself.
        self._put({n: each.pick(find_shards(each.codes) == n) for n, each in found.items()})

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n], -1 where it has none."""
        places = self.list_places(keys)
        there = (places >= 0) & (self._keys[places] == keys) & (self._uses[places] > 0)
        return torch.where(there, places, -1)

    def list_places(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n] as known here, -1 where it has none.

        If something else is there, memory has changed by itself.
        """
        codes = encode(keys)
        recent = self._recent.find(codes)
        return torch.where(recent >= 0, recent, self._base.find(codes))

    def add(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Record the places [n] of keys [n] that had none."""
        new = sort_keys(keys, places)
        kept = self._recent.pick(~torch.isin(self._recent.codes, new.codes))
        self._recent = kept.merge(new)
        limit = max(RECENT_MIN, len(self._base.codes) // RECENT_SHARE)
        if len(self._recent.codes) > limit:
            self._sort_in()

    def remove(self, keys: torch.Tensor) -> None:
        """Record that keys [n] have no places any longer."""
        codes = encode(keys)
        for part in (self._base, self._recent):
            part.forget(codes)

    def _sort_in(self) -> None:
        """Move the recent keys of one shard, the one with most of them, to its sorted keys."""
        owners = find_shards(self._recent.codes)
        shard = int(torch.bincount(owners, minlength=SHARDS).argmax())
        old = self._base.cut(shard)
        new = self._recent.pick((owners == shard) & (self._recent.places >= 0))
        still = (old.places >= 0) & ~torch.isin(old.codes, new.codes)
        self._put({shard: old.pick(still).merge(new)})

    def _put(self, parts: Mapping[int, SortedKeys]) -> None:
        """Replace the keys of some shards by these."""
        every = [parts[n] if n in parts else self._base.cut(n) for n in range(SHARDS)]
        codes, places = ([getattr(e, name) for e in every] for name in ("codes", "places"))
        self._base = SortedKeys(torch.cat(codes), torch.cat(places))
        is_put = torch.zeros(SHARDS, dtype=torch.bool)
        is_put[list(parts)] = True
        self._recent = self._recent.pick(~is_put[find_shards(self._recent.codes)])


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """Has the codes [n] of keys, each once, in growing order, and a place [n] for each.

    The place -1 stands for a key that has lost its own.
    """

    codes: torch.Tensor
    places: torch.Tensor

    def find(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each code [n], -1 for a code without a place."""
        if not len(self.codes):
            return torch.full_like(codes, -1)
        at = torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)
        return torch.where(self.codes[at] == codes, self.places[at], -1)

    def forget(self, codes: torch.Tensor) -> None:
        """Record that keys with these codes have no places any longer."""
        if len(self.codes):
            at = torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)
            self.places[at[self.codes[at] == codes]] = -1

    def cut(self, shard: int) -> SortedKeys:
        """Return the keys of one shard."""
        firsts = torch.tensor([shard, shard + 1]) - SHARDS // 2
        # The last shard ends with the largest code, beyond which there is no number.
        first, stop = torch.searchsorted(self.codes, firsts << CODE_BITS).tolist()
        here = slice(first, stop if shard < SHARDS - 1 else len(self.codes))
        return SortedKeys(self.codes[here], self.places[here])

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
