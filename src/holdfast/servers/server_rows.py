"""Keeps the rows of tables on one server, and what undoes their last updates.

A table's rows are arrays over the shards that the server holds: row k of the table is in shard
k % SHARDS, at place k // SHARDS there. All work is on whole arrays. Must not know connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.core.servers.placement import SHARDS
from holdfast.servers.row_checksums import ShardChecksums
from holdfast.servers.row_optimizers import RowOptimizer
from holdfast.servers.row_values import fill_rows
from holdfast.servers.table_shape import TableShape

FILLED_AT_ONCE = 1 << 16  # rows


@dataclass(slots=True)
class Undo:
    """Keeps the old values of the rows of one table that one update has changed.

    `places`: [rows] in growing order; `rows`: [rows, dim]; `slots`: [rows, width] each.
    """

    number: int
    places: torch.Tensor
    rows: torch.Tensor
    slots: Mapping[str, torch.Tensor]

    def without(self, places: range) -> Undo:
        """Return it without the rows at these places."""
        keep = (self.places < places.start) | (self.places >= places.stop)
        slots = {name: each[keep] for name, each in self.slots.items()}
        return Undo(self.number, self.places[keep], self.rows[keep], slots)


class ServerTable:
    """Keeps the rows of one table in some shards, with what their optimizer keeps for each."""

    def __init__(self, shape: TableShape, shards: Sequence[int], rule: RowOptimizer) -> None:
        self.shape = shape
        self._rule = rule
        self._order = {shard: i for i, shard in enumerate(shards)}
        self._first_place = torch.full((SHARDS,), -1, dtype=torch.int64)
        for shard, i in self._order.items():
            self._first_place[shard] = i * shape.shard_rows
        size = len(shards) * shape.shard_rows
        self._rows = torch.empty(size, shape.dim)
        self._slots = {
            name: torch.full((size, width), first)
            for name, (width, first) in rule.slots(shape.dim).items()
        }
        self._undos: list[Undo] = []
        sets = {"read": [self._rows], "updated": list(self._slots.values())}
        self.checksums = ShardChecksums(shards, sets)
        for shard in shards:
            self.begin(shard)

    def begin(self, shard: int) -> None:
        """Give all rows of a shard their first values."""
        shape, places = self.shape, self._places_of(shard)
        for start in range(0, len(places), FILLED_AT_ONCE):
            part = places[start : start + FILLED_AT_ONCE]
            first = np.uint64(shard + start * SHARDS)
            keys = np.arange(len(part), dtype=np.uint64) * np.uint64(SHARDS) + first
            fill_rows(self._rows[part.start : part.stop], keys, shape.seed, *shape.limits)
        if shape.padding is not None and shape.padding % SHARDS == shard:
            self._rows[places.start + shape.padding // SHARDS] = 0.0
        for name, (_, first_value) in self._rule.slots(shape.dim).items():
            self._slots[name][places.start : places.stop] = first_value
        self.checksums.seal_shard(shard)
        self._forget_undos(places)

    def read(self, keys: torch.Tensor, version: int) -> torch.Tensor:
        """Return rows [keys, dim] as they were after `version` updates."""
        places = self._place(keys)
        found = self._rows.index_select(0, places)
        for undo in reversed(self._undos):
            if undo.number > version and len(undo.places):
                at = torch.searchsorted(undo.places, places).clamp_(max=len(undo.places) - 1)
                changed = undo.places[at] == places
                found[changed] = undo.rows[at[changed]]
        return found

    def update(
        self, keys: torch.Tensor, grads: torch.Tensor, rate: float, step: int, number: int
    ) -> None:
        """Apply update `number` to these rows; `step`: the table's own count of updates."""
        places, order = self._place(keys).sort()
        old = {name: each.index_select(0, places) for name, each in self._slots.items()}
        self._undos.append(Undo(number, places, self._rows.index_select(0, places), old))
        self._rule.update_at(places, self._rows, self._slots, grads[order], lr=rate, step=step)
        self.checksums.seal(places, "read", "updated")

    def find_damaged(self, keys: torch.Tensor, *, whole: bool) -> set[int]:
        """Return the shards in which rows of these keys have changed by themselves.

        `whole`: what their optimizer keeps is looked at, too.
        """
        return self.checksums.find_damaged(
            self._place(keys), "read", *(["updated"] if whole else [])
        )

    def forget_undos(self, floor: int) -> None:
        """Drop what undoes updates up to `floor`."""
        self._undos = [undo for undo in self._undos if undo.number > floor]

    def parts(self, shard: int) -> Iterator[torch.Tensor]:
        """Yield the arrays of a shard: its rows, then its slots."""
        places = self._places_of(shard)
        for array in (self._rows, *self._slots.values()):
            yield array[places.start : places.stop]

    def copy(self, shard: int, version: int, array: int) -> torch.Tensor:
        """Return a copy of a shard's `array`th array as it was after `version` updates."""
        places = self._places_of(shard)
        found = list(self.parts(shard))[array].clone()
        for undo in reversed(self._undos):
            here = (undo.places >= places.start) & (undo.places < places.stop)
            if undo.number > version and bool(here.any()):
                old = (undo.rows, *undo.slots.values())[array]
                found[undo.places[here] - places.start] = old[here]
        return found

    @property
    def array_names(self) -> list[str]:
        """Return the names of a shard's arrays."""
        return ["rows", *self._slots]

    def adopt(self, shard: int, arrays: Sequence[torch.Tensor]) -> None:
        """Take over the arrays of a shard, as `parts` yields them."""
        for mine, other in zip(self.parts(shard), arrays, strict=True):
            mine.copy_(other)
        self.checksums.seal_shard(shard)
        self._forget_undos(self._places_of(shard))

    def _place(self, keys: torch.Tensor) -> torch.Tensor:
        return self._first_place[keys % SHARDS] + keys // SHARDS

    def _places_of(self, shard: int) -> range:
        first = self._order[shard] * self.shape.shard_rows
        return range(first, first + self.shape.shard_rows)

    def _forget_undos(self, places: range) -> None:
        self._undos = [undo.without(places) for undo in self._undos]
