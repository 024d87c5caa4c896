"""Keeps the rows of tables on one server, and what undoes their last updates.

Tables of one width share their arrays, so that a request for many tables takes a few operations on
whole arrays. There the tables come one after the other, and each has a part for every shard; only
the parts of shards that the server holds take memory: row k of a table is in shard k % SHARDS, at
place k // SHARDS of that part. Must not know connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch

from holdfast.tables.core.placement import SHARDS
from holdfast.tables.row_memory import FingerprintHistory, ReservedArrays, RowChecksums, Seal
from holdfast.tables.row_optimizers import RowOptimizer
from holdfast.tables.table_shape import TableShape, fill_rows, mark_shards

FILLED_AT_ONCE = 1 << 16  # rows


@dataclass(slots=True)
class Undo:
    """Keeps the old values of the rows that one update has changed.

    `places`: [n], each once; `rows`: [n, dim]; `slots`: [n, width] each.
    """

    number: int
    places: torch.Tensor
    rows: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    _ordered: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def ordered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places in growing order, and where each one was before."""
        if self._ordered is None:  # few updates are ever undone
            places, order = self.places.sort()
            self._ordered = places, order
        return self._ordered

    def drop_places(self, places: range) -> Undo:
        """Return it without the rows at these places."""
        keep = (self.places < places.start) | (self.places >= places.stop)
        slots = {name: each[keep] for name, each in self.slots.items()}
        return Undo(self.number, self.places[keep], self.rows[keep], slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedRows:
    """Keeps copies of the rows that a request names.

    `sizes`: how many of each table; `keys`, `places`: [n]; `rows`: [n, dim]; `slots`: [n, width].
    `owners`: [n], the number of each one's table times SHARDS, plus its shard.
    """

    sizes: Sequence[int]
    keys: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    slots: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUpdate:
    """Describes one update: for each table its keys [n], gradients [n, dim], count and rate.

    `writes`: the rows get the values in `grads`, and what the optimizer keeps for them stays.
    """

    keys: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    steps: Sequence[int]
    rates: Sequence[float]
    writes: bool = False

    def pick_tables(self, places: Sequence[int]) -> RowUpdate:
        """Return the part of these tables."""
        return RowUpdate(
            keys=[self.keys[i] for i in places],
            grads=[self.grads[i] for i in places],
            steps=[self.steps[i] for i in places],
            rates=[self.rates[i] for i in places],
            writes=self.writes,
        )


class RowBlock:
    """Keeps the rows of tables of one width in some shards, with the slots of their optimizer.

    `stale`: reads are often of earlier versions, so it also keeps each row's last update.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        shards: Sequence[int],
        rule: RowOptimizer,
        *,
        stale: bool = False,
    ) -> None:
        self.rule = rule
        sizes = [SHARDS * shape.shard_rows for shape in shapes]
        starts = list(accumulate(sizes, initial=0))
        dim, total, memory = shapes[0].dim, starts.pop(), ReservedArrays()
        slots = rule.slots(dim)
        self.arrays = {"rows": memory.make(total, dim)}
        self.arrays |= {name: memory.make(total, width) for name, (width, _) in slots.items()}
        self.undos: list[Undo] = []
        self.history = FingerprintHistory()
        self.updated = memory.make(total if stale else 0, 0, torch.int64)  # by which update
        # Looked at before rows are read, and also the second before they are updated.
        owners = len(shapes) * SHARDS
        self.checksums = [RowChecksums([self.arrays["rows"]], memory, owners)]
        if slots:
            kept = [self.arrays[name] for name in slots]
            self.checksums.append(RowChecksums(kept, memory, owners, 1))
        self._counts = torch.tensor([shape.count for shape in shapes])
        pairs = zip(shapes, starts, strict=True)
        self.tables = [
            ServerTable(self, shape, start, shards, number * SHARDS)
            for number, (shape, start) in enumerate(pairs)
        ]
        # By table and shard, one after the other; shards that are not here are refused before.
        firsts = [t.places_of(shard).start for t in self.tables for shard in range(SHARDS)]
        self._first_places = torch.tensor(firsts)

    def find_unknown(self, shards: Sequence[int], keys: Sequence[torch.Tensor]) -> int | None:
        """Return the place of the first table that lacks some of its keys in these shards."""
        every, tables = torch.cat(list(keys)), number_tables(keys)
        known = (every >= 0) & (every < self._counts[tables]) & mark_shards(shards)[every % SHARDS]
        return None if bool(known.all()) else int(tables[~known].min())

    def read(self, keys: Sequence[torch.Tensor], version: int) -> list[torch.Tensor] | set[int]:
        """Return rows [keys, dim] as they were after `version` updates, or damaged shards."""
        used = self._gather(keys, whole=False)
        damaged = self.find_damaged(used)
        if damaged:
            return damaged
        self._undo(used, version)
        return list(used.rows.split(used.sizes))

    def _undo(self, used: UsedRows, version: int) -> None:
        """Give copied rows their values as of a version.

        The first later update of a row has its old value, so each row is looked for until then.
        """
        undos = [undo for undo in self.undos if undo.number > version and len(undo.places)]
        left = torch.arange(len(used.places) if undos else 0)
        if len(self.updated) and undos:
            left = left[self.updated[used.places] > version]
        for undo in undos:
            places, order = undo.ordered
            wanted = used.places[left]
            at = torch.searchsorted(places, wanted).clamp_(max=len(places) - 1)
            changed = places[at] == wanted
            used.rows[left[changed]] = undo.rows[order[at[changed]]]
            left = left[~changed]
            if not len(left):
                return

    def prepare(self, number: int, shards: Sequence[int], update: RowUpdate) -> BlockUpdate:
        """Begin to apply update `number` to these shards."""
        keys, grads = update.keys, update.grads
        inside = mark_shards(shards)[torch.cat(list(keys)) % SHARDS]
        if not bool(inside.all()):
            masks = inside.split([each.shape[0] for each in keys])
            keys = [each[mask] for each, mask in zip(keys, masks, strict=True)]
            grads = [each[mask] for each, mask in zip(grads, masks, strict=True)]
        return BlockUpdate(
            block=self,
            number=number,
            used=self._gather(keys, whole=True),
            grads=torch.cat(list(grads)),
            rates=update.rates,
            steps=update.steps,
            writes=update.writes,
        )

    def find_damaged(self, used: UsedRows) -> set[int]:
        """Return the shards of the rows among these that have changed by themselves."""
        parts = [[used.rows], list(used.slots.values())]
        found: set[int] = set()
        for sums, part in zip(self.checksums, parts, strict=False):
            if part:
                wrong = sums.find_differing(used.places, part)
                found |= set((used.keys[wrong] % SHARDS).tolist())
        return found

    def put(
        self, used: UsedRows, rows: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Write rows and slots to the places of used ones.

        Returns the change of the fingerprints [SHARDS].
        """
        for array, part in zip(self.arrays.values(), (rows, *slots), strict=True):
            array.index_copy_(0, used.places, part)
        found = torch.zeros(SHARDS, dtype=torch.int64)
        for sums, parts in zip(self.checksums, ([rows], slots), strict=False):
            found += _sum_by_shard(sums.seal_copies(used.places, parts, used.owners))
        return found

    def take_fingerprints(self, version: int) -> torch.Tensor:
        """Return the fingerprint [SHARDS] of each shard as it was after `version` updates."""
        found = torch.zeros(SHARDS, dtype=torch.int64)
        for sums in self.checksums:
            found += _sum_by_shard(sums.totals)
        return self.history.undo(found, version)

    def forget_undos(self, floor: int) -> None:
        """Drop what undoes updates up to `floor`."""
        self.undos = [undo for undo in self.undos if undo.number > floor]
        self.history.forget(floor)

    def release(self, shard: int) -> None:
        """Give the memory of a shard back that is not held any more."""
        for number, table in enumerate(self.tables):
            for sums in self.checksums:
                sums.release(table.places_of(shard), number * SHARDS + shard)

    def _gather(self, keys: Sequence[torch.Tensor], *, whole: bool) -> UsedRows:
        """Copy the rows of these keys; `whole`: and their slots."""
        every = torch.cat(list(keys))
        at = number_tables(keys) * SHARDS + every % SHARDS
        places = self._first_places[at] + torch.div(every, SHARDS, rounding_mode="floor")
        found = {
            name: array.index_select(0, places)
            for name, array in self.arrays.items()
            if whole or name == "rows"
        }
        sizes = [each.shape[0] for each in keys]
        rows = found.pop("rows")
        return UsedRows(sizes=sizes, keys=every, owners=at, places=places, rows=rows, slots=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdate:
    """Updates some rows of a block, once it is known that they are sound."""

    block: RowBlock
    number: int
    used: UsedRows
    grads: torch.Tensor
    rates: Sequence[float]
    steps: Sequence[int]
    writes: bool

    @property
    def damaged(self) -> set[int]:
        """Return the shards of those rows that have changed by themselves."""
        return self.block.find_damaged(self.used)

    def apply(self) -> None:
        """Update the rows, and keep their old values."""
        used = self.used
        if not len(used.places):
            return
        rows = self.grads if self.writes else used.rows.clone()
        slots = {name: each.clone() for name, each in used.slots.items()}
        stop = 0
        uses = [] if self.writes else zip(self.rates, self.steps, used.sizes, strict=True)
        for (rate, step), tables in groupby(uses, key=lambda use: use[:2]):
            start, stop = stop, stop + sum(size for *_, size in tables)
            part = {name: each[start:stop] for name, each in slots.items()}
            self.block.rule.update(rows[start:stop], part, self.grads[start:stop], rate, step)
        changes = self.block.put(used, rows, list(slots.values()))
        self.block.history.record(self.number, changes)
        self.block.undos.append(Undo(self.number, used.places, used.rows, used.slots))
        if len(self.block.updated):
            self.block.updated[used.places] = self.number


class ServerTable:
    """Is one table of a block. Its places begin at `start`, its parts' numbers at `first_owner`."""

    def __init__(
        self,
        block: RowBlock,
        shape: TableShape,
        start: int,
        shards: Sequence[int],
        first_owner: int,
    ) -> None:
        self.shape, self._block, self._start, self._held = shape, block, start, list(shards)
        self._first_owner = first_owner

    def places_of(self, shard: int) -> range:
        """Return the place of a shard in the arrays."""
        first = self._start + shard * self.shape.shard_rows
        return range(first, first + self.shape.shard_rows)

    def fill(self, shard: int, arrays: Sequence[torch.Tensor]) -> None:
        """Give all rows of a shard, whose arrays these are, their first values."""
        shape, (rows, *slots) = self.shape, arrays
        for start in range(0, len(rows), FILLED_AT_ONCE):
            part = rows[start : start + FILLED_AT_ONCE]
            first = np.uint64(shard + start * SHARDS)
            keys = np.arange(len(part), dtype=np.uint64) * np.uint64(SHARDS) + first
            fill_rows(part, keys, shape.seed, *shape.limits)
        if shape.padding is not None and shape.padding % SHARDS == shard:
            rows[shape.padding // SHARDS] = 0.0
        firsts = self._block.rule.slots(shape.dim).values()
        for slot, (_, first_value) in zip(slots, firsts, strict=True):
            slot.fill_(first_value)

    def hold(self, shards: Sequence[int]) -> None:
        """Keep rows in these shards alone from now on."""
        for shard in self._held:
            if shard not in shards:
                self.drop(shard)
        self._held = list(shards)

    def parts(self, shard: int) -> Iterator[torch.Tensor]:
        """Yield the arrays of a shard: its rows, then its slots."""
        places = self.places_of(shard)
        for array in self._block.arrays.values():
            yield array[places.start : places.stop]

    def copy(self, shard: int, version: int, array: int, part: range) -> torch.Tensor:
        """Return a copy of a part of a shard's `array`th array, as after `version` updates."""
        places = self.places_of(shard)[part.start : part.stop]
        found = list(self.parts(shard))[array][part.start : part.stop].clone()
        for undo in reversed(self._block.undos):
            here = (undo.places >= places.start) & (undo.places < places.stop)
            if undo.number > version and bool(here.any()):
                old = (undo.rows, *undo.slots.values())[array]
                found[undo.places[here] - places.start] = old[here]
        return found

    @property
    def array_names(self) -> list[str]:
        """Return the names of a shard's arrays."""
        return list(self._block.arrays)

    def sum_up(self, shard: int, arrays: Sequence[torch.Tensor]) -> list[Seal]:
        """Return the checksums of a shard whose arrays these are, as `parts` yields them."""
        rows, *slots = arrays
        checksums, places = self._block.checksums, self.places_of(shard)
        kept = zip(checksums, ([rows], slots), strict=False)
        return [sums.sum_up(places, each) for sums, each in kept]

    def seal(self, shard: int, seals: Sequence[Seal]) -> None:
        """Take a shard as it was written for right: these are its checksums."""
        for sums, seal in zip(self._block.checksums, seals, strict=True):
            sums.seal_part(self.places_of(shard), self._first_owner + shard, seal)

    def is_damaged(self, shard: int, part: range) -> bool:
        """Return whether anything in this part of a shard's places has changed by itself."""
        places = self.places_of(shard)[part.start : part.stop]
        return any(len(sums.find_damaged(places)) for sums in self._block.checksums)

    def drop(self, shard: int) -> None:
        """Forget what undoes updates of a shard, which is bare from now on."""
        places, block = self.places_of(shard), self._block
        block.undos = [undo.drop_places(places) for undo in block.undos]
        block.history.drop(shard)


def _sum_by_shard(totals: torch.Tensor) -> torch.Tensor:
    """Return the sums [SHARDS] over all tables of numbers [tables * SHARDS]."""
    return totals.view(-1, SHARDS).sum(0)


def number_tables(keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the place of the table [n] of each key, for the keys of all tables in turn."""
    sizes = torch.tensor([each.shape[0] for each in keys])
    return torch.arange(len(keys)).repeat_interleave(sizes)
