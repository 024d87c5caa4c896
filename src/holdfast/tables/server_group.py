"""Keeps one group of tables on a server: its rows, and how far each shard is.

One lock covers both, so a read sees all of an update or no part of it. Reads that are one update
early wait for a moment, since that update is mostly on its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.errors import Damaged, UserError, WireError, assert_never
from holdfast.tables.core.holdings import (
    BARE,
    WINDOW,
    AdoptCopy,
    ApplyUpdate,
    BeginCopies,
    CopyArrived,
    CopyFailed,
    CopyOffered,
    DropShards,
    ForgetUpdate,
    Holdings,
    HoldingsEvent,
    ShardsChosen,
    ShardsGivenUp,
    ShardStanding,
    UpdateArrived,
)
from holdfast.tables.keyed_rows import KeyedTable, find_keys
from holdfast.tables.row_memory import Seal
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.server_wire import NEWEST, TABLES_MAX, TableGroup
from holdfast.tables.table_set import TableSet

PART_BYTES = 1 << 22  # copied at a time, so that reads and updates wait for milliseconds only
EVERY_UPDATE = 1 << 62
EARLY_S = 0.05  # a read waits for an update on its way up to this long


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Has arrays that were read, and the fingerprints of the shards that were asked for."""

    arrays: list[torch.Tensor]
    fingerprints: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """Has copies of all arrays of a shard, table by table, as of `version`."""

    version: int
    arrays: list[torch.Tensor]
    fingerprint: int


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Has the checksums of a copied shard, by table.

    `fingerprint`: the one that it is to have, if that is known.
    """

    seals: Sequence[Sequence[Seal]]
    fingerprint: int | None


@dataclass(slots=True, eq=False)
class Pin:
    """Keeps `shards` as they were after `version` updates; it loses the shards that get other rows.

    `for_save`: it loses all once a save of a later version begins. Storage may hang for ever.
    """

    version: int
    shards: set[int]
    for_save: bool


class _Pins:
    """Keeps all pins of a group."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    def add(self, pin: Pin) -> None:
        for other in self._pins:
            if pin.for_save and other.for_save and other.version < pin.version:
                other.shards.clear()
        self._pins.append(pin)

    def remove(self, pin: Pin) -> None:
        self._pins.remove(pin)

    def lose(self, shards: Iterable[int]) -> None:
        """Remove these shards, which get other rows, from all pins."""
        for pin in self._pins:
            pin.shards.difference_update(shards)

    @property
    def oldest(self) -> int:
        """Return the earliest version that is pinned."""
        return min((pin.version for pin in self._pins if pin.shards), default=EVERY_UPDATE)


class ServerGroup:
    """Keeps shards of a group's tables. Safe to use from several threads.

    UserError, WireError; RuntimeError: there is not enough memory. All shards are bare.
    """

    def __init__(self, group: TableGroup, shards: Sequence[int], layout: int = 0) -> None:
        if len(group.tables) > TABLES_MAX:
            raise WireError(f"{len(group.tables)} tables in one group: {TABLES_MAX} are the most")
        self.group = group
        self._layout = layout
        self.tables = TableSet(group, shards)
        self._holdings = Holdings(shards, WINDOW + group.staleness)
        self._updates: dict[int, RowUpdate] = {}  # early updates by token
        self._copies: dict[int, _Arrived] = {}  # by shard
        self._tokens = 0
        self._pins = _Pins()  # versions that are being copied
        self._damaged: set[int] = set()  # shards to drop
        # Shards that no answer has named yet.
        self._dropped: set[int] = set()
        self._changed = threading.Condition()
        # A thread that writes to bare shards, or chooses the shards, takes this before the other
        # lock.
        self._bare = threading.Lock()

    def hold(self, shards: Sequence[int], layout: int) -> None:
        """Hold these shards alone from now on, unless `layout` is no newer than the last one.

        RuntimeError: there is not enough memory.
        """
        with self._changed:
            if layout <= self._layout:
                return
        with self._bare, self._changed:
            if layout <= self._layout:
                return
            gone = set(self.tables.shards) - set(shards)
            self.tables.hold(shards)
            self._pins.lose(gone)
            self._layout = layout
            self._handle(ShardsChosen(self.tables.shards))
            self.tables.release(sorted(gone))

    def read(
        self,
        version: int,
        shards: Sequence[int],
        keys: Sequence[torch.Tensor],
        compared: Sequence[int] = (),
    ) -> ShardRows | ShardStanding:
        """Return the rows of each table as of `version`, or how far the shards are. WireError.

        The fingerprints are of these shards and of the `compared` ones.
        """
        self.tables.check_keys(shards, keys)
        shards = [*shards, *compared]
        until = time.monotonic() + EARLY_S
        with self._changed:
            while True:
                standing = self._holdings.judge(version, shards)
                if standing.can_serve:
                    found = self.tables.read(version, keys)
                    if not isinstance(found, set):
                        return ShardRows(found, self._take_fingerprints(version, shards))
                    self._drop(found)
                    continue
                left_s = until - time.monotonic()
                early = all(BARE < have == version - 1 for _, have in standing.behind)
                if not early or standing.past or standing.copying or left_s <= 0:
                    return standing
                self._changed.wait(left_s)

    def update(
        self, number: int, shards: Sequence[int], update: RowUpdate, oldest: int | None = None
    ) -> ShardStanding:
        """Take an update in; returns how far these shards are. WireError.

        `oldest`: they count as past if they cannot be read as of this version.
        """
        self.tables.check_keys(shards, update.keys)
        with self._changed:
            self._tokens += 1
            self._updates[self._tokens] = update
            self._handle(UpdateArrived(number, tuple(shards), self._tokens))
            return self._holdings.judge_span(number if oldest is None else oldest, number, shards)

    def _take_fingerprints(self, version: int, shards: Sequence[int]) -> tuple[int, ...]:
        found = self.tables.take_fingerprints(version).tolist()
        return tuple(found[shard] for shard in shards)

    def drop_wrong(self, shard: int, version: int, fingerprint: int) -> None:
        """Drop a shard if this is its fingerprint after `version` updates, which is wrong."""
        with self._changed:
            standing = self._holdings.judge(version, [shard])
            if standing.can_serve and self._take_fingerprints(version, [shard]) == (fingerprint,):
                self._handle(ShardsGivenUp((shard,)))

    def handle(self, event: CopyOffered | CopyFailed) -> tuple[int, ...]:
        """Apply an event that brings no rows; returns the shards to copy now."""
        with self._changed:
            return self._handle(event)

    def scrub(self, shard: int, part: range) -> None:
        """Look for memory that has changed by itself in this part of a shard's places."""
        with self._changed:
            has_rows = self._holdings.is_held(shard) and self._holdings.version(shard) > BARE
            if has_rows and any(table.is_damaged(shard, part) for table in self.tables.all):
                self._drop({shard})

    def take_dropped(self) -> tuple[int, ...]:
        """Return the shards that were dropped since the last call, as their memory had changed."""
        with self._changed:
            dropped, self._dropped = tuple(sorted(self._dropped)), set()
            return dropped

    def judge(self, version: int, shards: Sequence[int]) -> ShardStanding:
        """Return these shards' numbers of updates for a read as of `version`; others are past."""
        with self._changed:
            return self._holdings.judge(version, shards)

    def pin(self, version: int, shards: Sequence[int], *, for_save: bool = False) -> Pin | None:
        """Keep these shards as they were after `version` updates, until `unpin`.

        None: their rows as of that version are not known.
        """
        with self._changed:
            if not self._holdings.judge(version, shards).can_serve:
                return None
            found = Pin(version, set(shards), for_save)
            self._pins.add(found)
            self._forget_undos()
            return found

    def unpin(self, pin: Pin) -> None:
        """Release the rows that `pin` keeps."""
        with self._changed:
            self._pins.remove(pin)
            self._forget_undos()

    def copy_as_of(self, pin: Pin, shard: int, table: int, array: int) -> torch.Tensor:
        """Return a copy of one array of a shard as of a version that is pinned. Damaged.

        It is made in parts, with reads and updates in between.
        """
        kept, name = self.tables.all[table], f"shard {shard} of {self.group.name}"
        sizes = self.tables.sizes(shard, table)
        shape, dtype = sizes[array]
        found = torch.empty(shape, dtype=dtype)
        # All arrays of a part are compared with their checksums.
        at_once = max(PART_BYTES // sum(each[1] * kind.itemsize for each, kind in sizes), 1)
        for start in range(0, shape[0], at_once):
            part = range(start, min(start + at_once, shape[0]))
            with self._changed:
                if shard not in pin.shards:
                    raise Damaged(f"{name} is not kept as of {pin.version} updates any longer")
                if kept.is_damaged(shard, part):
                    self._drop({shard})
                    raise Damaged(f"{name} has changed in memory by itself")
                found[part.start : part.stop] = kept.copy(shard, pin.version, array, part)
        return found

    def copy(self, shard: int, version: int = NEWEST) -> ShardCopy:
        """Return copies of a shard's arrays as they are now, or after `version` updates. WireError.

        It is refused if they are not known.
        """
        with self._changed:
            if not self._holdings.is_held(shard):
                raise WireError(f"shard {shard} is not on this server")
            newest = self._holdings.version(shard)
            version = newest if version == NEWEST else version
            pin = self.pin(version, [shard]) if newest > BARE else None
            if pin is None:
                raise WireError(f"shard {shard} is not known as of {version} updates")
            (fingerprint,) = self._take_fingerprints(version, [shard])
        try:
            arrays = [
                self.copy_as_of(pin, shard, table, array)
                for table, each in enumerate(self.tables.all)
                for array in range(len(each.array_names))
            ]
        except Damaged as error:
            raise WireError(str(error)) from None
        finally:
            self.unpin(pin)
        return ShardCopy(version, arrays, fingerprint)

    def read_keys(
        self,
        version: int,
        shards: Sequence[int],
        table: int,
        part: range,
        compared: Sequence[int] = (),
    ) -> ShardRows | ShardStanding:
        """Return the keys that have rows at these places of some shards of a table. WireError.

        Or how far the shards are. The fingerprints are of these and of the `compared` ones.
        """
        every, kept = [*shards, *compared], self.tables.all[table]
        if not isinstance(kept, KeyedTable):
            raise WireError(f"table {table} has rows for all its numbers, and no keys")
        with self._changed:
            for shard in shards:
                self.scrub(shard, part)
            standing = self._holdings.judge(version, every)
            if not standing.can_serve:
                return standing
            none = torch.empty(0, dtype=torch.int64)
            keys = torch.cat([none, *(find_keys(kept, shard, version, part) for shard in shards)])
            return ShardRows([keys], self._take_fingerprints(version, every))

    def adopt(
        self,
        arrived: CopyArrived,
        arrays: list[list[torch.Tensor]],
        fingerprint: int | None = None,
    ) -> None:
        """Take in a copy of a shard; drop it again if it has another fingerprint than this."""
        shard = arrived.shard
        copy = _Arrived(self.tables.sum_up(shard, arrays), fingerprint)
        with self._bare:
            with self._changed:
                if not self._holdings.is_wanted(arrived):
                    self._handle(CopyFailed((shard,)))
                    return
                self._handle(ShardsGivenUp((shard,)))
            # Reads never wait for long: a bare shard is not read or updated.
            self.tables.write(shard, arrays)
            with self._changed:
                self._copies[shard] = copy
                self._handle(arrived)
                self._copies.pop(shard, None)

    # ------------------------------------------------------------ carrying out

    def _handle(self, event: HoldingsEvent) -> tuple[int, ...]:
        copied: tuple[int, ...] = ()
        for effect in self._holdings.handle(event):
            match effect:
                case ApplyUpdate(number, shards, token):
                    self._damaged |= self.tables.apply(number, shards, self._updates[token])
                case BeginCopies(shards):
                    copied = shards
                case AdoptCopy(shard):
                    self._adopt(shard)
                case DropShards(shards):
                    self._pins.lose(shards)
                    for shard in shards:
                        self.tables.drop(shard)
                case ForgetUpdate(token):
                    self._updates.pop(token, None)
                case _:
                    assert_never(effect)
        if self._damaged:
            self._drop(self._damaged)
        else:
            self._forget_undos()
            self._changed.notify_all()
        return copied

    def _forget_undos(self) -> None:
        """Drop the old values of rows that no worker can ask for any more."""
        self.tables.forget_undos(min(self._holdings.floor, self._pins.oldest))

    def _adopt(self, shard: int) -> None:
        copy = self._copies.pop(shard)
        self.tables.seal(shard, copy.seals)
        if copy.fingerprint not in (None, *self._take_fingerprints(EVERY_UPDATE, [shard])):
            self._damaged.add(shard)

    def _drop(self, shards: set[int]) -> None:
        """Drop shards whose memory has changed by itself."""
        self._damaged = set()
        self._dropped |= shards
        self._handle(ShardsGivenUp(tuple(sorted(shards))))


def fill_shard(group: ServerGroup, shard: int) -> None:
    """Give all rows of a shard their first values; other shards can be read in the meantime."""
    arrays = group.tables.make_room(shard)
    for table, each in zip(group.tables.all, arrays, strict=True):
        table.fill(shard, each)
    group.adopt(CopyArrived(shard, 0, replaces=True), arrays)


def check_same(known: TableGroup, other: TableGroup) -> None:
    """Raise UserError if workers describe a group in different ways."""
    if other == known:
        return
    for mine, theirs in zip(known.tables, other.tables, strict=False):
        if mine != theirs:
            raise UserError(
                f"table {theirs.name}: two workers describe it differently "
                f"({_describe(mine)}, {_describe(theirs)}): all workers must run the same script"
            )
    raise UserError(
        f"tables {other.name}: two workers have other tables or another optimizer under this "
        "name: all workers must run the same script"
    )


def _describe(shape: object) -> str:
    return str(shape).removeprefix("TableShape")
