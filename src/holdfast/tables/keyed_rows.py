"""Keeps rows for any 64-bit keys, in some shards of a table: those of the keys that are in use.

A key gets a place at the first update that uses its row, or after several (`admit_after`). If a
shard has no place left, the keys that were used least recently or least often lose theirs. A key
without a place has its first value. All of this follows from a shard's updates alone,
and not from the servers that hold the shards. Must not know connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.engine.core.errors import WireError
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.row_memory import (
    FingerprintHistory,
    KeyIndex,
    ReservedArrays,
    Seal,
    ShardChecksums,
    encode,
    sort_keys,
)
from holdfast.tables.row_optimizers import RowOptimizer
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.table_shape import FREQUENCY, TableShape, fill_rows, hash_keys

GIVEN_UP_SHARE = 16  # a full shard gives up this share of its places at once, at least
FORGET_AFTER = 1000  # updates; uses that are further apart do not add up to an admission
USES, LAST = 0, 1  # columns of the arrays "used" and "seen"
#: Every place of a shard.
EVERY_PLACE = range(1 << 62)


@dataclass(slots=True)
class _Undo:
    """Keeps the places that an update has changed as they were before it.

    `places`: [n]; `old`: by array, [n, width]. `added`: keys that had no row. `cells`: of `seen`.
    """

    number: int
    places: torch.Tensor
    old: Mapping[str, torch.Tensor]
    added: torch.Tensor
    cells: torch.Tensor
    old_cells: torch.Tensor
    _before: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def before(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys that were there, in growing order, and where in `old` these are."""
        if self._before is None:  # few updates are ever undone
            had = (self.old["used"][:, USES] > 0).nonzero().flatten()
            keys, order = self.old["keys"][had, 0].sort()
            self._before = keys, had[order]
        return self._before

    def drop_shard(
        self, places: tuple[int, int], cells: tuple[int, int], added: torch.Tensor
    ) -> _Undo:
        """Return it without the places and cells of a shard; `added`: keys of the rest."""
        stays = (self.places < places[0]) | (self.places >= places[1])
        counted = (self.cells < cells[0]) | (self.cells >= cells[1])
        return replace(
            self,
            places=self.places[stays],
            old={name: each[stays] for name, each in self.old.items()},
            _before=None,
            added=added,
            cells=self.cells[counted],
            old_cells=self.old_cells[counted],
        )


@dataclass(frozen=True, slots=True)
class _Moves:
    """Lists keys with their new places, and the places whose keys lose them."""

    keys: torch.Tensor
    places: torch.Tensor
    emptied: torch.Tensor


class KeyCounts:
    """Counts the uses of keys that have no row yet, if a key needs several of them.

    `cells` for each shard. `seen`: [SHARDS * cells, 2] int64.
    """

    def __init__(self, shape: TableShape, memory: ReservedArrays) -> None:
        assert shape.keyed is not None, "a table of keys"
        self._shape, self._admit_after = shape, shape.keyed.admit_after
        self.cells = shape.shard_rows if self._admit_after > 1 else 0
        self.seen = memory.make(SHARDS * self.cells, 2, torch.int64)

    def admit(
        self, keys: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the keys that get a row at an update, and cells [n] with new counts [n, 2]."""
        if not self.cells:
            return keys, torch.empty(0, dtype=torch.int64), self.seen[:0].clone()
        at = self.find_cells(keys)
        cells, inverse, uses = at.unique(return_inverse=True, return_counts=True)
        old = self.seen[cells]
        counts = torch.where(old[:, LAST] + FORGET_AFTER >= number, old[:, USES], 0) + uses
        admitted = keys[counts[inverse] >= self._admit_after]
        return admitted, cells, torch.stack([counts, torch.full_like(counts, number)], dim=1)

    def find_cells(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the cell [n] of each key [n], if there are any cells."""
        hashes = (hash_keys(keys) >> np.uint64(8)) % np.uint64(self.cells)
        return self._shape.shards_of(keys) * self.cells + torch.from_numpy(hashes.astype(np.int64))


def first_values(shape: TableShape, keys: torch.Tensor) -> torch.Tensor:
    """Return the first values [n, dim] of the rows of these keys."""
    rows = torch.empty(len(keys), shape.dim)
    fill_rows(rows, hash_keys(keys), shape.seed, *shape.limits)
    if shape.padding is not None:
        rows[keys == shape.padding] = 0.0
    return rows


def sort_into_sets(
    arrays: Mapping[str, torch.Tensor], slots: Iterable[str]
) -> dict[str, list[torch.Tensor]]:
    """Sort a table's arrays, by name, into the sets whose checksums are looked at together."""
    found = {
        "read": [arrays["rows"], arrays["keys"], arrays["used"]],
        "updated": [arrays[name] for name in slots],
    }
    return found | ({"seen": [arrays["seen"]]} if "seen" in arrays else {})


class KeyedTable:
    """Keeps the rows of one table by key, in some shards: what ServerTable is for numbered rows.

    Arrays, each with `shard_rows` places for each shard, held or not: `keys` [places, 1] int64,
    `used` [places, 2] int64 (how many updates have used the key, 0 for a free place; the last of
    these), `rows` [places, dim], and the slots of the optimizer. `seen` [cells, 2] int64 does for
    keys without a row as `used` does, but several keys share a cell. `undoes`: earlier versions can
    be read, and each row has a checksum, as on a server.
    """

    def __init__(
        self,
        shape: TableShape,
        shards: Sequence[int],
        rule: RowOptimizer,
        *,
        undoes: bool = True,
    ) -> None:
        assert shape.keyed is not None, "a table of keys"
        self._undoes = undoes
        self.shape, self._rules, self._rule = shape, shape.keyed, rule
        self._held = list(shards)
        size, memory = SHARDS * shape.shard_rows, ReservedArrays(whole=not undoes)
        self.arrays: dict[str, torch.Tensor] = {
            "rows": memory.make(size, shape.dim),
            "keys": memory.make(size, 1, torch.int64),
            "used": memory.make(size, 2, torch.int64),
        }
        slots = rule.slots(shape.dim)
        for name, (width, _) in slots.items():
            self.arrays[name] = memory.make(size, width)
        self._first_slots = {name: first for name, (_, first) in slots.items()}
        self._counts = KeyCounts(shape, memory)
        if self._counts.cells:
            self.arrays["seen"] = self._counts.seen
        self.array_names = list(self.arrays)  # in the order of `parts`
        self._undos: list[_Undo] = []
        self._index = KeyIndex(self.arrays["keys"][:, 0], self.arrays["used"][:, USES])
        self._free: dict[int, torch.Tensor] = {}  # free places of each shard, in growing order
        # Shards whose keys have changed since the index took them in.
        self._unknown = set(shards)
        sets = sort_into_sets(self.arrays, slots) if undoes else {}
        self.checksums = ShardChecksums(sets, memory)
        self.history = FingerprintHistory()
        for shard in () if undoes else shards:
            self.fill(shard, list(self.parts(shard)))

    def forget_index(self) -> None:
        """Look all keys up again before the next use: the arrays have been written to."""
        self._unknown |= set(self._held)

    def _find_index(self) -> KeyIndex:
        """Return the index of all keys, after a look at the keys that it does not know."""
        taken: dict[int, torch.Tensor] = {}
        for shard in sorted(self._unknown):
            start, stop = self._range_of(shard, "used")
            is_held, is_free = shard in self._held, self.arrays["used"][start:stop, USES] == 0
            taken[shard] = (~is_free & is_held).nonzero().flatten() + start
            self._free[shard] = (is_free & is_held).nonzero().flatten() + start
        if taken:
            self._index.replace(taken)
            self._unknown.clear()
        return self._index

    def fill(self, _: int, arrays: Sequence[torch.Tensor]) -> None:
        """Empty a shard whose arrays these are: all its keys have their first values."""
        for name, part in zip(self.array_names, arrays, strict=True):
            part.fill_(self._first_slots.get(name, 0))

    def hold(self, shards: Sequence[int]) -> None:
        """Keep rows in these shards alone from now on."""
        for shard in self._held:
            if shard not in shards:
                self.drop(shard)
        self._unknown |= set(shards).difference(self._held)
        self._held = list(shards)

    def find_damaged(self, keys: torch.Tensor, *, whole: bool) -> set[int]:
        """Return the shards in which rows of these keys have changed by themselves.

        `whole`: what updates of them need is looked at, too; that is all of a shard that must give
        rows up.
        """
        known = self._find_index().list_places(keys)
        found = self.checksums.find_damaged(known[known >= 0], "read")
        if not whole:
            return found
        found |= self.checksums.find_damaged(known[known >= 0], "updated")
        lacks = keys[known < 0]
        if self._counts.cells:
            found |= self.checksums.find_damaged(self._counts.find_cells(lacks), "seen")
        shards, counts = self.shape.shards_of(lacks).unique(return_counts=True)
        for shard, count in zip(shards.tolist(), counts.tolist(), strict=True):
            if count > len(self._free[shard]) and self.checksums.is_damaged(shard, range(1 << 62)):
                found.add(shard)
        return found

    def read(self, keys: torch.Tensor, version: int) -> torch.Tensor:
        """Return rows [keys, dim] as they were after `version` updates."""
        places = self._find_index().find(keys)
        there = places >= 0
        if bool(there.all()):
            found = self.arrays["rows"].index_select(0, places)
        else:
            found = first_values(self.shape, keys)
            found[there] = self.arrays["rows"].index_select(0, places[there])
        for undo in reversed(self._undos):
            if undo.number > version:
                added = torch.isin(keys, undo.added)
                if bool(added.any()):
                    found[added] = first_values(self.shape, keys[added])
                before, order = undo.before
                if len(before):
                    at = torch.searchsorted(before, keys).clamp_(max=len(before) - 1)
                    had = before[at] == keys
                    found[had] = undo.old["rows"][order[at[had]]]
        return found

    def update(
        self, keys: torch.Tensor, grads: torch.Tensor, rate: float, step: int, number: int
    ) -> None:
        """Apply update `number` to the rows of these keys [n], each once.

        `step`: the table's own count of updates.
        """
        if not bool((keys[1:] > keys[:-1]).all()):
            keys, order = keys.sort()
            grads = grads[order]
        index = self._find_index()
        places = index.find(keys)
        lacks = places < 0
        admitted, cells, counts = self._counts.admit(keys[lacks], number)
        moves = self._place(admitted, places[~lacks])
        if self._undoes:
            self._remember(number, places[~lacks], moves, cells)
        self._counts.seen[cells] = counts
        self._carry_out(moves)
        places[lacks] = sort_keys(moves.keys, moves.places).find(encode(keys[lacks]))
        stored = places >= 0
        if not bool(stored.all()):
            places, grads = places[stored], grads[stored]
        used = self.arrays["used"]
        used[places, USES] += 1
        used[places, LAST] = number
        slots = {name: self.arrays[name] for name in self._first_slots}
        self._rule.update_at(places, self.arrays["rows"], slots, grads, lr=rate, step=step)
        changed = torch.cat([places, moves.places, moves.emptied]).unique()
        changes = self.checksums.seal(changed, "read", "updated")
        changes += self.checksums.seal(cells, "seen")
        if self._undoes:
            self.history.record(number, changes)

    def forget_undos(self, floor: int) -> None:
        """Drop what undoes updates up to `floor`."""
        self._undos = [undo for undo in self._undos if undo.number > floor]
        self.history.forget(floor)

    def parts(self, shard: int) -> Iterator[torch.Tensor]:
        """Yield the arrays of a shard."""
        for name, array in self.arrays.items():
            yield array[slice(*self._range_of(shard, name))]

    def copy(self, shard: int, version: int, array: int, part: range) -> torch.Tensor:
        """Return a copy of a part of a shard's `array`th array, as after `version` updates."""
        name = self.array_names[array]
        first, end = self._range_of(shard, name)
        start, stop = first + part.start, min(first + part.stop, end)
        found = self.arrays[name][start:stop].clone()
        for undo in reversed(self._undos):
            if undo.number > version:
                is_count = name == "seen"
                places = undo.cells if is_count else undo.places
                old = undo.old_cells if is_count else undo.old[name]
                here = (places >= start) & (places < stop)
                found[places[here] - start] = old[here]
        return found

    def is_damaged(self, shard: int, part: range) -> bool:
        """Return whether anything in this part of a shard's places has changed by itself."""
        return self.checksums.is_damaged(shard, part)

    def sum_up(self, shard: int, arrays: Sequence[torch.Tensor]) -> list[Seal]:
        """Return the checksums of a shard whose arrays these are, as `parts` yields them."""
        given = dict(zip(self.array_names, arrays, strict=True))
        return self.checksums.sum_up(shard, sort_into_sets(given, self._first_slots))

    def seal(self, shard: int, seals: Sequence[Seal]) -> None:
        """Take a shard as it was written for right: these are its checksums."""
        self.checksums.seal_shard(shard, seals)
        self._unknown.add(shard)

    def drop(self, shard: int) -> None:
        """Forget what undoes updates of a shard, which is bare from now on."""
        places, cells = self._range_of(shard, "used"), self._range_of(shard, "seen")
        self._undos = [
            undo.drop_shard(places, cells, undo.added[self.shape.shards_of(undo.added) != shard])
            for undo in self._undos
        ]
        self.history.drop(shard)
        self._unknown.add(shard)

    # ------------------------------------------------------------ one update

    def _place(self, keys: torch.Tensor, busy: torch.Tensor) -> _Moves:
        """Find places for new keys [n], in growing order; those at `busy` keep theirs."""
        found, places, emptied = [], [], []
        shards = self.shape.shards_of(keys)
        for shard in shards.unique().tolist():
            mine = keys[shards == shard]
            free = self._free[shard]
            if len(mine) > len(free):
                given_up = self._choose_given_up(shard, len(mine) - len(free), busy)
                emptied.append(given_up)
                free = torch.cat([free, given_up]).sort().values
            count = min(len(mine), len(free))
            found.append(mine[:count])
            places.append(free[:count])
            self._free[shard] = free[count:]
        none = keys.new_empty(0)
        return _Moves(*(torch.cat([none, *each]) for each in (found, places, emptied)))

    def _choose_given_up(self, shard: int, needed: int, busy: torch.Tensor) -> torch.Tensor:
        """Return the places whose keys lose them: `needed` or more of them, if there are any."""
        start, stop = self._range_of(shard, "used")
        may_go = torch.ones(stop - start, dtype=torch.bool)
        may_go[busy[(busy >= start) & (busy < stop)] - start] = False
        may_go &= self.arrays["used"][start:stop, USES] > 0
        places = may_go.nonzero().flatten() + start
        used, keys = self.arrays["used"][places].numpy(), self.arrays["keys"][places, 0].numpy()
        by_age = (keys, used[:, LAST])
        order = np.lexsort((*by_age, used[:, USES]) if self._rules.evict == FREQUENCY else by_age)
        count = max(needed, self.shape.shard_rows // GIVEN_UP_SHARE)
        return places[torch.from_numpy(order[:count].copy())]

    def _remember(
        self, number: int, busy: torch.Tensor, moves: _Moves, cells: torch.Tensor
    ) -> None:
        """Keep what the update is about to change."""
        places = torch.cat([busy, moves.places, moves.emptied]).unique()
        old = {n: a[places] for n, a in self.arrays.items() if n != "seen"}
        self._undos.append(
            _Undo(
                number=number,
                places=places,
                old=old,
                added=moves.keys,
                cells=cells,
                old_cells=self._counts.seen[cells],
            )
        )

    def _carry_out(self, moves: _Moves) -> None:
        arrays = self.arrays
        self._index.remove(arrays["keys"][moves.emptied, 0])
        arrays["used"][moves.emptied] = 0
        if not len(moves.keys):
            return
        arrays["keys"][moves.places, 0] = moves.keys
        arrays["rows"][moves.places] = first_values(self.shape, moves.keys)
        for name, first in self._first_slots.items():
            arrays[name][moves.places] = first
        arrays["used"][moves.places] = 0
        self._index.add(moves.keys, moves.places)

    # ------------------------------------------------------------ places

    def _range_of(self, shard: int, name: str) -> tuple[int, int]:
        """Return the part of an array with the places of a shard: from, to."""
        size = self._counts.cells if name == "seen" else self.shape.shard_rows
        return shard * size, (shard + 1) * size


def find_keys(
    table: KeyedTable, shard: int, version: int, part: range = EVERY_PLACE
) -> torch.Tensor:
    """Return the keys [n] that had rows after `version` updates at these places of a shard."""
    keys, used = (
        table.copy(shard, version, table.array_names.index(name), part) for name in ("keys", "used")
    )
    return keys[used[:, USES] > 0, 0]


class KeyedBlock:
    """Is a block of one table, whose rows have keys: what RowBlock is for numbered rows."""

    def __init__(self, table: KeyedTable) -> None:
        self.tables = [table]

    def find_unknown(self, shards: Sequence[int], keys: Sequence[torch.Tensor]) -> int | None:
        """Return 0 if some of the keys are not in these shards."""
        (table,) = self.tables
        return None if bool(table.shape.are_in(shards, keys[0]).all()) else 0

    def read(self, keys: Sequence[torch.Tensor], version: int) -> list[torch.Tensor] | set[int]:
        """Return rows [keys, dim] as they were after `version` updates, or damaged shards."""
        (table,) = self.tables
        return table.find_damaged(keys[0], whole=False) or [table.read(keys[0], version)]

    def prepare(self, number: int, shards: Sequence[int], update: RowUpdate) -> KeyedUpdate:
        """Begin to apply update `number` to these shards."""
        (table,), (keys,), (grads,) = self.tables, update.keys, update.grads
        inside = table.shape.are_in(shards, keys)
        if update.writes and len(keys):
            raise WireError(f"table {table.shape.name} has keys: its rows cannot be written")
        if not bool(inside.all()):
            keys, grads = keys[inside], grads[inside]
        return KeyedUpdate(
            table=table,
            number=number,
            keys=keys,
            grads=grads,
            rate=update.rates[0],
            step=update.steps[0],
        )

    def take_fingerprints(self, version: int) -> torch.Tensor:
        """Return the fingerprint [SHARDS] of each shard as it was after `version` updates."""
        (table,) = self.tables
        return table.history.undo(table.checksums.totals, version)

    def forget_undos(self, floor: int) -> None:
        """Drop what undoes updates up to `floor`."""
        self.tables[0].forget_undos(floor)

    def release(self, shard: int) -> None:
        """Give the memory of a shard back that is not held any more."""
        self.tables[0].checksums.release(shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedUpdate:
    """Updates rows of a table of keys, once it is known that they are sound."""

    table: KeyedTable
    number: int
    keys: torch.Tensor
    grads: torch.Tensor
    rate: float
    step: int

    @property
    def damaged(self) -> set[int]:
        """Return the shards in which something that the update needs has changed by itself."""
        return self.table.find_damaged(self.keys, whole=True)

    def apply(self) -> None:
        """Update the rows."""
        if len(self.keys):
            self.table.update(self.keys, self.grads, self.rate, self.step, self.number)
