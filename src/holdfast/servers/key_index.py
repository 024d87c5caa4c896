"""Finds where the row of each key is, for whole arrays of keys.

The index only points: an entry that is out of date does no harm, since `find` compares with the key
that is at the place now. It is no part of a table's state and can be made again at any time.
"""

from __future__ import annotations

import torch

RECENT_MIN = 1 << 12  # keys added one update after another, before all are sorted again
RECENT_SHARE = 8


class KeyIndex:
    """Points from keys to places. `keys` [places] int64 and `taken` [places] bool are the truth."""

    def __init__(self, keys: torch.Tensor, taken: torch.Tensor) -> None:
        self._keys, self._taken = keys, taken
        self.rebuild()

    def rebuild(self) -> None:
        """Look at all places again."""
        places = self._taken.nonzero().flatten()
        self._base = _Sorted(self._keys[places], places)
        none = places.new_empty(0)
        self._recent = _Sorted(none, none)

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
        old = self._recent
        stays = ~torch.isin(old.keys, keys)
        self._recent = _Sorted(
            torch.cat([old.keys[stays], keys]), torch.cat([old.places[stays], places])
        )
        if len(self._recent.keys) > max(RECENT_MIN, len(self._base.keys) // RECENT_SHARE):
            self.rebuild()


class _Sorted:
    """Keeps keys in growing order, each with a place."""

    def __init__(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        self.keys, order = keys.sort()
        self.places = places[order]

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place of each key; any place for one that is not here."""
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return self.places[at]
