"""Keeps all tables of a group in some shards, in blocks of tables that are handled together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from holdfast.engine.core.errors import WireError
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.keyed_rows import KeyedBlock, KeyedTable
from holdfast.tables.row_memory import Seal, check_room
from holdfast.tables.server_rows import RowBlock, RowUpdate, ServerTable
from holdfast.tables.server_wire import TableGroup


class TableSet:
    """Keeps the tables, `all` of them in the group's order. UserError, WireError, RuntimeError.

    Their shards are bare: memory is reserved for them, and rows have to come.
    """

    def __init__(self, group: TableGroup, shards: Sequence[int]) -> None:
        self._group, self.shards = group, tuple(shards)
        rule, shapes = group.make_rule(), group.tables
        check_room(len(shards) * group.shard_bytes)
        blocks: list[tuple[list[int], RowBlock | KeyedBlock]] = []
        for width in sorted({shape.dim for shape in shapes if not shape.keyed}):
            chosen = [i for i, s in enumerate(shapes) if not s.keyed and s.dim == width]
            these, stale = [shapes[i] for i in chosen], group.staleness > 0
            blocks.append((chosen, RowBlock(these, shards, rule, stale=stale)))
        for i, shape in enumerate(shapes):
            if shape.keyed:
                blocks.append(([i], KeyedBlock(KeyedTable(shape, shards, rule))))
        self._blocks = blocks  # the places of each block's tables, and the block
        tables: dict[int, ServerTable | KeyedTable] = {
            place: table
            for chosen, block in blocks
            for place, table in zip(chosen, [*block.tables], strict=True)
        }
        self.all = [tables[i] for i in range(len(shapes))]

    def hold(self, shards: Sequence[int]) -> None:
        """Keep rows in these shards alone from now on; new ones are bare. RuntimeError."""
        added = set(shards).difference(self.shards)
        check_room(len(added) * self._group.shard_bytes)
        self.shards = tuple(shards)
        for table in self.all:
            table.hold(shards)

    def release(self, shards: Iterable[int]) -> None:
        """Give the memory of shards back that are not held any more."""
        for shard in shards:
            for _, block in self._blocks:
                block.release(shard)

    def array_names(self, table: int) -> list[str]:
        """Return the names of the arrays of one table."""
        return self.all[table].array_names

    def drop(self, shard: int) -> None:
        """Forget what undoes updates of a shard, which is bare from now on."""
        for table in self.all:
            table.drop(shard)

    def make_room(self, shard: int) -> list[list[torch.Tensor]]:
        """Return arrays to be filled with those of a shard, by table."""
        return [[torch.empty_like(part) for part in table.parts(shard)] for table in self.all]

    def sum_up(self, shard: int, arrays: Sequence[Sequence[torch.Tensor]]) -> list[list[Seal]]:
        """Return the checksums of a shard that has these arrays, by table."""
        pairs = zip(self.all, arrays, strict=True)
        return [table.sum_up(shard, each) for table, each in pairs]

    def write(self, shard: int, arrays: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give a shard these arrays, by table, which count once `seal` is called."""
        for table, each in zip(self.all, arrays, strict=True):
            write_shard(table, shard, each)

    def seal(self, shard: int, seals: Sequence[Sequence[Seal]]) -> None:
        """Take a shard as it was written for right: these are its checksums, by table."""
        for table, each in zip(self.all, seals, strict=True):
            table.seal(shard, each)

    def sizes(self, shard: int, table: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and types of a shard's arrays of one table."""
        return [(tuple(part.shape), part.dtype) for part in self.all[table].parts(shard)]

    def check_keys(self, shards: Sequence[int], keys: Sequence[torch.Tensor]) -> None:
        """Raise WireError for keys that these shards do not hold, or for shards of no table."""
        if not all(0 <= shard < SHARDS for shard in shards):
            raise WireError(f"shards {list(shards)}, where there are {SHARDS}")
        for chosen, block in self._blocks:
            found = block.find_unknown(shards, [keys[i] for i in chosen])
            if found is not None:
                shape, given = self._group.tables[chosen[found]], keys[chosen[found]]
                least, most = (int(k) for k in torch.aminmax(given))
                raise WireError(f"table {shape.name}: keys from {least} to {most} are not here")

    def read(self, version: int, keys: Sequence[torch.Tensor]) -> list[torch.Tensor] | set[int]:
        """Return the rows [n, dim] of each table as of `version`, or the damaged shards."""
        rows: dict[int, torch.Tensor] = {}
        damaged: set[int] = set()
        for chosen, block in self._blocks:
            found = block.read([keys[i] for i in chosen], version)
            if isinstance(found, set):
                damaged |= found
            else:
                rows |= zip(chosen, found, strict=True)
        return damaged or [rows[i] for i in range(len(keys))]

    def take_fingerprints(self, version: int) -> torch.Tensor:
        """Return the fingerprint [SHARDS] of each shard as it was after `version` updates.

        It covers all rows and slots of all tables.
        """
        found = torch.zeros(SHARDS, dtype=torch.int64)
        for number, (_, block) in enumerate(self._blocks):
            found += (2 * number + 1) * block.take_fingerprints(version)
        return found

    def apply(self, number: int, shards: Sequence[int], update: RowUpdate) -> set[int]:
        """Apply an update to those of these shards that are sound; return the dropped ones."""
        parts = [
            block.prepare(number, shards, update.pick_tables(chosen))
            for chosen, block in self._blocks
        ]
        damaged = set().union(*(part.damaged for part in parts))
        if damaged:
            sound = [shard for shard in shards if shard not in damaged]
            return damaged | self.apply(number, sound, update)
        for part in parts:
            part.apply()
        return set()

    def forget_undos(self, floor: int) -> None:
        """Drop what undoes updates up to `floor`."""
        for _, block in self._blocks:
            block.forget_undos(floor)


def write_shard(
    table: ServerTable | KeyedTable, shard: int, arrays: Sequence[torch.Tensor]
) -> None:
    """Give a shard these arrays, as the table's `parts` yields them; its `seal` comes next."""
    for mine, other in zip(table.parts(shard), arrays, strict=True):
        mine.copy_(other)
