"""Keeps one group of tables on a server: its rows, and how far each shard is.

One lock covers both, so a read sees all of an update or nothing of it. Reads that are one update
early wait for a moment, since that update is mostly on its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.core.errors import Damaged, UserError, WireError, assert_never
from holdfast.core.servers.holdings import (
    WINDOW,
    AdoptCopy,
    ApplyUpdate,
    CopyArrived,
    CopyBegun,
    CopyFailed,
    ForgetUpdate,
    Holdings,
    HoldingsEvent,
    ResetAsked,
    ResetShards,
    ShardsDamaged,
    ShardStanding,
    UpdateArrived,
)
from holdfast.servers.keyed_rows import KeyedTable
from holdfast.servers.server_rows import ServerTable
from holdfast.servers.server_wire import TABLES_MAX, TableGroup

EVERY_PLACE = range(1 << 62)
EARLY_S = 0.05  # a read waits for an update on its way up to this long


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUpdate:
    """Describes one update: for each table its keys [n], gradients [n, dim], count and rate."""

    keys: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    steps: Sequence[int]
    rates: Sequence[float]


class ServerGroup:
    """Keeps shards of a group's tables. Safe to use from several threads."""

    def __init__(self, group: TableGroup, shards: Sequence[int]) -> None:
        if len(group.tables) > TABLES_MAX:
            raise WireError(f"{len(group.tables)} tables in one group: {TABLES_MAX} are the most")
        self.group = group
        self.shards = tuple(shards)
        self._tables: list[ServerTable | KeyedTable] = []
        self._holdings = Holdings(shards, WINDOW + group.staleness)
        self._updates: dict[int, RowUpdate] = {}  # early updates by token
        self._copies: dict[int, list[list[torch.Tensor]]] = {}  # by shard: arrays of each table
        self._tokens = 0
        self._pins: list[int] = []  # versions that are being saved
        self._damaged: set[int] = set()  # shards to drop
        self._dropped: set[int] = set()  # those that nobody was told of yet
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Make the rows, with their first values. UserError, WireError."""
        rule = self.group.make_rule()
        kinds = [KeyedTable if shape.keyed else ServerTable for shape in self.group.tables]
        pairs = zip(kinds, self.group.tables, strict=True)
        self._tables = [kind(shape, self.shards, rule) for kind, shape in pairs]

    def check_same(self, group: TableGroup) -> None:
        """Raise UserError if workers describe the group in another way."""
        if group == self.group:
            return
        for mine, other in zip(self.group.tables, group.tables, strict=False):
            if mine != other:
                raise UserError(
                    f"table {other.name}: two workers describe it differently "
                    f"({_describe(mine)}, {_describe(other)}): all workers must run the same script"
                )
        raise UserError(
            f"tables {group.name}: two workers have other tables or another optimizer under this "
            "name: all workers must run the same script"
        )

    def read(
        self, version: int, shards: Sequence[int], keys: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | ShardStanding:
        """Return the rows of each table as of `version`, or how far the shards are. WireError."""
        _check_keys(self, shards, keys)
        until = time.monotonic() + EARLY_S
        with self._changed:
            while True:
                standing = self._holdings.judge(version, shards)
                if standing.can_serve:
                    damaged = _find_damaged(self._tables, keys, whole=False)
                    if not damaged:
                        pairs = zip(self._tables, keys, strict=True)
                        return [table.read(each, version) for table, each in pairs]
                    self._drop(damaged)
                    continue
                left_s = until - time.monotonic()
                early = all(have == version - 1 for _, have in standing.behind)
                if not early or standing.past or standing.copying or left_s <= 0:
                    return standing
                self._changed.wait(left_s)

    def update(self, number: int, shards: Sequence[int], update: RowUpdate) -> ShardStanding:
        """Take an update in; returns how far these shards are now. WireError."""
        _check_keys(self, shards, update.keys)
        with self._changed:
            self._tokens += 1
            self._updates[self._tokens] = update
            self._handle(UpdateArrived(number, tuple(shards), self._tokens))
            return self._holdings.judge(number, shards)

    def handle(self, event: CopyBegun | CopyFailed | ResetAsked) -> None:
        """Apply an event that brings no rows."""
        with self._changed:
            self._handle(event)

    def scrub(self, shard: int, part: range) -> None:
        """Look for memory that has changed by itself in this part of a shard's places."""
        with self._changed:
            if any(table.checksums.is_damaged(shard, part) for table in self._tables):
                self._drop({shard})

    def take_dropped(self) -> tuple[int, ...]:
        """Return the shards that were dropped since the last call, as their memory had changed."""
        with self._changed:
            dropped, self._dropped = tuple(sorted(self._dropped)), set()
            return dropped

    def is_copying(self, shards: Sequence[int]) -> bool:
        """Return whether some of these shards are being fetched."""
        with self._changed:
            return bool(self._holdings.judge(1 << 62, shards).copying)

    def pin(self, version: int, shards: Sequence[int]) -> bool:
        """Keep these shards as they were after `version` updates, until `unpin`, if they are known.

        Returns whether they are.
        """
        with self._changed:
            if not self._holdings.judge(version, shards).can_serve:
                return False
            self._pins.append(version)
            return True

    def unpin(self, version: int) -> None:
        """Let what `pin` keeps go."""
        with self._changed:
            self._pins.remove(version)

    def copy_as_of(self, shard: int, version: int, table: int, array: int) -> torch.Tensor:
        """Return a copy of one array of a shard as of a version that is pinned. Damaged."""
        with self._changed:
            if self._tables[table].checksums.is_damaged(shard, EVERY_PLACE):
                self._drop({shard})
            if not self._holdings.judge(version, [shard]).can_serve:
                raise Damaged(f"shard {shard} of {self.group.name} has changed in memory by itself")
            return self._tables[table].copy(shard, version, array)

    def array_names(self, table: int) -> list[str]:
        """Return the names of the arrays of one table."""
        return self._tables[table].array_names

    def copy(self, shard: int) -> tuple[int, list[torch.Tensor]]:
        """Return a shard's version, and copies of its arrays, table by table. WireError."""
        if shard not in self.shards:
            raise WireError(f"shard {shard} is not on this server")
        self.scrub(shard, EVERY_PLACE)
        with self._changed:
            version = self._holdings.version(shard)
            return version, [part.clone() for table in self._tables for part in table.parts(shard)]

    def make_room(self, shard: int) -> list[list[torch.Tensor]]:
        """Return arrays to be filled with those of a shard, by table."""
        return [[torch.empty_like(part) for part in table.parts(shard)] for table in self._tables]

    def sizes(self, shard: int, table: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and types of a shard's arrays of one table."""
        return [(tuple(part.shape), part.dtype) for part in self._tables[table].parts(shard)]

    def keys_as_of(
        self, version: int, shards: Sequence[int], table: int
    ) -> torch.Tensor | ShardStanding:
        """Return the keys of a table that have rows, or how far the shards are. WireError."""
        kept = self._tables[table]
        if not isinstance(kept, KeyedTable) or not set(shards) <= set(self.shards):
            raise WireError(f"the keys of table {table} in shards {shards} are not here")
        for shard in shards:
            self.scrub(shard, EVERY_PLACE)
        with self._changed:
            standing = self._holdings.judge(version, shards)
            if not standing.can_serve:
                return standing
            return torch.cat([kept.keys_of(shard, version) for shard in shards])

    def adopt(self, arrived: CopyArrived, arrays: list[list[torch.Tensor]]) -> None:
        """Take in a copy of a shard."""
        shard = arrived.shard
        with self._changed:
            self._copies[shard] = arrays
            self._handle(arrived)
            self._copies.pop(shard, None)

    # ------------------------------------------------------------ carrying out

    def _handle(self, event: HoldingsEvent) -> None:
        for effect in self._holdings.handle(event):
            match effect:
                case ApplyUpdate(number, shards, token):
                    self._damaged |= _apply(self._tables, number, shards, self._updates[token])
                case AdoptCopy(shard):
                    pairs = zip(self._tables, self._copies.pop(shard), strict=True)
                    for table, arrays in pairs:
                        table.adopt(shard, arrays)
                case ResetShards(shards):
                    for table in self._tables:
                        for shard in shards:
                            table.begin(shard)
                case ForgetUpdate(token):
                    self._updates.pop(token, None)
                case _:
                    assert_never(effect)
        if self._damaged:
            self._drop(self._damaged)
            return
        for table in self._tables:
            table.forget_undos(min([self._holdings.floor, *self._pins]))
        self._changed.notify_all()

    def _drop(self, shards: set[int]) -> None:
        """Begin again with the first values of shards whose memory has changed by itself."""
        self._damaged = set()
        self._dropped |= shards
        self._handle(ShardsDamaged(tuple(sorted(shards))))


def _apply(
    tables: Sequence[ServerTable | KeyedTable],
    number: int,
    shards: Sequence[int],
    update: RowUpdate,
) -> set[int]:
    """Apply an update to those of these shards that are sound; return the others."""
    masks = [t.shape.are_in(shards, k) for t, k in zip(tables, update.keys, strict=True)]
    chosen = [keys[mask] for keys, mask in zip(update.keys, masks, strict=True)]
    damaged = _find_damaged(tables, chosen, whole=True)
    if damaged:
        sound = [shard for shard in shards if shard not in damaged]
        return damaged | _apply(tables, number, sound, update)
    for i, (table, keys) in enumerate(zip(tables, chosen, strict=True)):
        if len(keys):
            grads = update.grads[i]
            grads = grads if len(keys) == len(grads) else grads[masks[i]]
            table.update(keys, grads, update.rates[i], update.steps[i], number)
    return set()


def _find_damaged(
    tables: Sequence[ServerTable | KeyedTable], keys: Sequence[torch.Tensor], *, whole: bool
) -> set[int]:
    """Return the shards in which rows of these keys [n] have changed by themselves."""
    pairs = zip(tables, keys, strict=True)
    return set().union(*(t.find_damaged(each, whole=whole) for t, each in pairs if len(each)))


def _check_keys(group: ServerGroup, shards: Sequence[int], keys: Sequence[torch.Tensor]) -> None:
    """Raise WireError for keys that these shards do not hold."""
    if not set(shards) <= set(group.shards):
        raise WireError(f"shards {sorted(set(shards) - set(group.shards))} are not here")
    for shape, each in zip(group.group.tables, keys, strict=True):
        if not len(each):
            continue
        least, most = (int(k) for k in torch.aminmax(each))
        known = shape.keyed is not None or (least >= 0 and most < shape.count)
        if not known or not bool(shape.are_in(shards, each).all()):
            raise WireError(f"table {shape.name}: keys from {least} to {most} are not here")


def _describe(shape: object) -> str:
    return str(shape).removeprefix("TableShape")
