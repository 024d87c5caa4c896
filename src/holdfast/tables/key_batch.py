"""Puts the keys of all tables of a group into one array, so that few operations handle them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.servers.placement import SHARDS
from holdfast.tables.server_rows import RowUpdate, number_tables
from holdfast.tables.table_shape import TableShape, mark_shards


@dataclass(frozen=True, slots=True)
class WidthRun:
    """Describes neighbouring tables of one width: their keys are from `start` to before `stop`."""

    tables: range
    start: int
    stop: int
    dim: int


class KeyBatch:
    """Keeps the keys [n] of all tables, one table after the other."""

    def __init__(self, shapes: Sequence[TableShape], keys: Sequence[torch.Tensor]) -> None:
        self.keys = torch.cat(list(keys))
        self.sizes = [each.shape[0] for each in keys]
        self._tables = number_tables(keys)
        self._count = len(shapes)
        if any(shape.keyed for shape in shapes):
            pairs = zip(shapes, keys, strict=True)
            self._shards = torch.cat([shape.shards_of(each) for shape, each in pairs])
        else:
            self._shards = self.keys % SHARDS
        self.runs = list(_find_runs(shapes, self.sizes))

    def find_shards(self) -> list[int]:
        """Return the shards that the keys are in."""
        found: list[int] = torch.bincount(self._shards, minlength=SHARDS).nonzero()[:, 0].tolist()
        return found

    def find_places(self, shards: Sequence[int]) -> torch.Tensor:
        """Return the places in `keys` of the keys in these shards: [n], in growing order."""
        return mark_shards(shards)[self._shards].nonzero()[:, 0]

    def count_by_table(self, places: torch.Tensor) -> tuple[int, ...]:
        """Return how many of these places each table has."""
        return tuple(torch.bincount(self._tables[places], minlength=self._count).tolist())

    def split_places(self, places: torch.Tensor) -> list[torch.Tensor]:
        """Return these places for each run, counted from its first key on."""
        ends = torch.tensor([run.stop for run in self.runs[:-1]], dtype=torch.int64)
        parts = places.tensor_split(torch.searchsorted(places, ends).tolist())
        return [part - run.start for run, part in zip(self.runs, parts, strict=True)]


class SentUpdate:
    """Keeps an update as arrays, from which the part for a server is picked quickly."""

    def __init__(self, shapes: Sequence[TableShape], update: RowUpdate) -> None:
        self.batch = KeyBatch(shapes, update.keys)
        self.steps, self.rates = tuple(update.steps), tuple(update.rates)
        self.writes = update.writes
        self._grads = [torch.cat([update.grads[i] for i in run.tables]) for run in self.batch.runs]

    def pick_update(self, shards: Sequence[int]) -> RowUpdate:
        """Return the part of the update in these shards."""
        places = self.batch.find_places(shards)
        counts = self.batch.count_by_table(places)
        dims = [run.dim for run in self.batch.runs for _ in run.tables]
        sizes = [n * dim for n, dim in zip(counts, dims, strict=True)]
        flat = self.pick_grads(places).split(sizes)
        return RowUpdate(
            keys=self.batch.keys[places].split(counts),
            grads=[each.view(-1, dim) for each, dim in zip(flat, dims, strict=True)],
            steps=self.steps,
            rates=self.rates,
            writes=self.writes,
        )

    def pick_grads(self, places: torch.Tensor) -> torch.Tensor:
        """Return the gradients at these places of the batch, as one flat array."""
        parts = zip(self._grads, self.batch.split_places(places), strict=True)
        return torch.cat([grads.index_select(0, at).reshape(-1) for grads, at in parts])


def _find_runs(shapes: Sequence[TableShape], sizes: Sequence[int]) -> Iterator[WidthRun]:
    first = start = at = 0
    for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        at += size
        if i + 1 == len(shapes) or shapes[i + 1].dim != shape.dim:
            yield WidthRun(range(first, i + 1), start, at, shape.dim)
            first, start = i + 1, at
