"""Finds where the row of each key is, for whole arrays of keys.

The index only points: an entry that is out of date does no harm, since `find` compares with the key
that is at the place now. It is no part of a table's state and can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

RECENT_MIN = 1 << 12  # keys added one update after another, before all are sorted again
RECENT_SHARE = 8


class KeyIndex:
    """Points from keys to places. `keys` [places] int64 and `taken` [places] bool are the truth.

    The places are in parts of `size`, one after the other. It is empty until `look_at`.
    """

    def __init__(self, keys: torch.Tensor, taken: torch.Tensor, size: int) -> None:
        self._keys, self._taken, self._size = keys, taken, max(size, 1)
        self._base = self._recent = _Sorted(keys[:0], keys[:0])

    def look_at(self, parts: Iterable[int]) -> None:
        """Look at all places of some parts again."""
        changed = torch.zeros(-(-len(self._keys) // self._size), dtype=torch.bool)
        chosen = sorted(parts)
        changed[chosen] = True
        self._base, self._recent = (
            each.pick(~changed[each.places // self._size]) for each in (self._base, self._recent)
        )
        places = [torch.empty(0, dtype=torch.int64)]
        for part in chosen:
            start = part * self._size
            places.append(self._taken[start : start + self._size].nonzero().flatten() + start)
        every = torch.cat(places)
        self._base = self._base.merge(_sort(self._keys[every], every))

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n], -1 where it has none."""
        found = torch.full_like(keys, -1)
        for part in (self._base, self._recent):
            if len(part.keys):
                places = part.find(keys)
                there = self._taken[places] & (self._keys[places] == keys)
                found = torch.where(there, places, found)
        return found

    def add(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Record the places [n] of keys [n] that had none."""
        old = self._recent.pick(~torch.isin(self._recent.keys, keys))
        self._recent = _sort(torch.cat([old.keys, keys]), torch.cat([old.places, places]))
        if len(self._recent.keys) > max(RECENT_MIN, len(self._base.keys) // RECENT_SHARE):
            self.look_at(range(-(-len(self._keys) // self._size)))


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Has keys [n] in growing order, and a place [n] for each."""

    keys: torch.Tensor
    places: torch.Tensor

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place of each key; any place for one that is not here."""
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return self.places[at]

    def pick(self, mask: torch.Tensor) -> _Sorted:
        """Return the keys where `mask` [n] is true."""
        return self if bool(mask.all()) else _Sorted(self.keys[mask], self.places[mask])

    def merge(self, other: _Sorted) -> _Sorted:
        """Return the keys of both, in far less time than sorting them takes."""
        if not len(self.keys) or not len(other.keys):
            return other if len(other.keys) else self
        at = torch.searchsorted(self.keys, other.keys) + torch.arange(len(other.keys))
        mine = torch.ones(len(self.keys) + len(other.keys), dtype=torch.bool)
        mine[at] = False
        keys, places = (torch.empty(len(mine), dtype=torch.int64) for _ in range(2))
        keys[at], places[at] = other.keys, other.places
        keys[mine], places[mine] = self.keys, self.places
        return _Sorted(keys, places)


def _sort(keys: torch.Tensor, places: torch.Tensor) -> _Sorted:
    found, order = keys.sort()
    return _Sorted(found, places[order])
