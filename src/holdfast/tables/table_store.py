"""Saves shards of tables as shares of a checkpoint, and loads them again.

A table's array is saved as a tensor [places, SHARDS, width], and each shard is a part of it: row
place * SHARDS + shard of the table. So any number of servers can load it, and exported files have
the rows in order. One plain entry of each share says which version its rows are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.engine.core.errors import Damaged
from holdfast.engine.state.store.checkpoint_reading import OneEntry, load
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import TABLES, Entry, Manifest
from holdfast.engine.state.store.saving import Item, Saving
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.tables.core.holdings import CopyArrived
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.server_group import Pin, ServerGroup
from holdfast.tables.server_wire import SaveShards

VERSION_BYTES_MAX = 1 << 16
_VERSION = ".version"


@dataclass(frozen=True, slots=True)
class _ShardItem:
    """Is one array of one shard, copied when it is written: a store.saving.Item."""

    group: ServerGroup
    pin: Pin
    table: int
    shard: int
    array: int

    @property
    def name(self) -> str:
        return name_of(self.group, self.table, self.array)

    @property
    def data(self) -> memoryview:
        """Copy the array as it was after the version."""
        return memory_of(self.group.copy_as_of(self.pin, self.shard, self.table, self.array))

    @property
    def dtype(self) -> str:
        return str(self._size[1]).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        places, _, width = self.whole
        return places, 1, width

    @property
    def offset(self) -> tuple[int, ...]:
        return 0, self.shard, 0

    @property
    def whole(self) -> tuple[int, ...]:
        places, width = self._size[0]
        return places, SHARDS, width

    @property
    def _size(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.group.tables.sizes(self.shard, self.table)[self.array]


class TableStore:
    """Saves shards into a job's checkpoints, and loads them from there."""

    def __init__(self, store: Checkpoints) -> None:
        self._store = store
        self._published: list[Saving] = []  # shares that a checkpoint writer commits
        self._lock = threading.Lock()

    def save(self, group: ServerGroup, request: SaveShards, pin: Pin) -> None:
        """Save shards as share `writer` of a checkpoint, from a pinned version. WorldError."""
        for before in self._take_older(request.step):
            before.abandon()
        name = f"{TABLES}{group.group.name}{_VERSION}.{request.writer}"
        about = json.dumps({"version": request.version}).encode()
        items: list[Any] = [Item(name=name, data=memoryview(about))]
        items += [
            _ShardItem(group, pin, table, shard, array)
            for table in range(len(group.group.tables))
            for shard in request.shards
            for array in range(len(group.tables.array_names(table)))
        ]
        saving = self._store.begin(request.step, request.token, request.writer)
        try:
            # Each share is of a "shard" of its own, so its state is compared with no other.
            part = saving.write(items, request.writer, shard=-1 - request.writer)
            saving.publish(part)
        except BaseException:
            saving.abandon()
            raise
        with self._lock:
            self._published.append(saving)

    def load(self, group: ServerGroup, step: int, shards: Sequence[int]) -> Iterator[int]:
        """Load shards from a checkpoint, and yield each once the group has it.

        WorldError, Damaged.
        """
        manifest = self._store.manifest(step)
        version = self._version(manifest, group)
        by_place = {
            (entry.name, entry.offset): entry
            for entry in manifest.entries
            if entry.name.startswith(TABLES)
        }
        for shard in shards:
            found = group.tables.make_room(shard)
            targets = []
            for table, arrays in enumerate(found):
                for i, array in enumerate(arrays):
                    entry = by_place.get((name_of(group, table, i), (0, shard, 0)))
                    targets.append((_pick_entry(entry, array, manifest, group), memory_of(array)))
            with self._store.reading() as storage:
                load(storage, manifest, targets)
            group.adopt(CopyArrived(shard, version, replaces=True), found)
            yield shard

    def _version(self, manifest: Manifest, group: ServerGroup) -> int:
        """Return the version of a group's rows in a checkpoint. Damaged."""
        start = f"{TABLES}{group.group.name}{_VERSION}."
        names = [e.name for e in manifest.entries if e.name.startswith(start)]
        versions = set()
        for name in names:
            about = OneEntry(name, VERSION_BYTES_MAX)
            self._store.load(manifest.step, about)
            try:
                versions.add(int(json.loads(bytes(about.data))["version"]))
            except (ValueError, KeyError, TypeError):
                raise Damaged(f"{name} of step {manifest.step} has no version") from None
        if len(versions) != 1:
            raise Damaged(
                f"the checkpoint of step {manifest.step} has no rows of {group.group.name}, or of "
                "several versions"
            )
        return versions.pop()

    def _take_older(self, step: int) -> list[Saving]:
        """Return shares of earlier checkpoints, which are committed by now, or never."""
        with self._lock:
            older = [saving for saving in self._published if saving.step < step]
            self._published = [saving for saving in self._published if saving.step >= step]
        return older


def name_of(group: ServerGroup, table: int, array: int) -> str:
    """Return the name of a table's array in a checkpoint."""
    return f"{TABLES}{group.group.tables[table].name}.{group.tables.array_names(table)[array]}"


def _pick_entry(
    entry: Entry | None, array: torch.Tensor, manifest: Manifest, group: ServerGroup
) -> Entry:
    """Return an entry if it fits an array. Damaged."""
    if entry is None or entry.size != array.nbytes:
        raise Damaged(
            f"the checkpoint of step {manifest.step} has other tables than {group.group.name}"
        )
    return entry
