"""Reads and updates rows on servers, for one group of tables of a worker.

The script's thread reads; another thread for each server sends it the updates. What else a server
needs is decided in core/reading.py.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from holdfast.engine.core.errors import UserError, WireError
from holdfast.tables import server_wire as wire
from holdfast.tables.core.heirs import HolderAnswer
from holdfast.tables.core.holdings import WINDOW
from holdfast.tables.core.placement import SHARDS, choose_part, choose_savers
from holdfast.tables.core.reading import Give, OrderCopy, bring_up
from holdfast.tables.row_reader import KeyRead, RowRead, RowReader
from holdfast.tables.server_access import ServerAccess
from holdfast.tables.server_connection import (
    HolderBook,
    KeptUpdates,
    SentUpdate,
    ServerConnection,
    ServerFull,
)
from holdfast.tables.server_rows import RowUpdate

#: Updates that a worker keeps, without the ones that reads do not know yet.
KEPT = WINDOW
SAVE_TRIES, SAVE_PAUSE_S = 50, 0.1  # to order a save, since a server may lack an update yet
#: Places of each shard, in which a server looks for keys within its patience.
PLACES_AT_ONCE = 1 << 16
#: Updates that wait for one server, which asks for any further ones.
QUEUE_MAX = 64


class RowClient:
    """Reads and updates the rows of one group. `read` and `push` belong to the script's thread.

    An heir is sent all updates of its server, and its rows are read if the server has none.
    """

    def __init__(self, group: wire.TableGroup, access: ServerAccess) -> None:
        self._group, self._access = group, access
        self.book = HolderBook(group.name, access)
        self._kept = KeptUpdates(KEPT + access.link.settings.staleness)
        self.reader = RowReader(group, self.book, self._kept, access.link.lose)
        self._queues: dict[int, queue.Queue[tuple[int, tuple[int, ...]]]] = {}

    def begin_from(self, version: int, step: int) -> None:
        """Record that the state has come from the checkpoint of `step`, as has each row.

        `version`: how many updates the rows there have had.
        """
        self.reader.stored = version, step

    def keep_unread(self, version: int, unread: Sequence[RowUpdate]) -> None:
        """Keep the updates after `version`, which came with the state, if they are not kept yet."""
        if unread and self._kept.find(version + len(unread)) is None:
            updates = enumerate(unread, version + 1)
            self._kept.replace({n: SentUpdate(self._group.tables, each) for n, each in updates})

    def read(
        self, version: int, keys: Sequence[torch.Tensor], *, as_half: bool = False
    ) -> list[torch.Tensor]:
        """Return the rows [n, dim] of each table's keys [n] as of `version`. UserError.

        `as_half`: rounded to float16, as which they travel.
        """
        job = RowRead(self._group, version, keys, as_half=as_half)
        self.reader.carry_on(job, job.find_shards())
        return job.rows

    def read_keys(self, version: int, table: int) -> torch.Tensor:
        """Return the keys [n] of a table that have rows as of `version`, in order. UserError."""
        found, places = [torch.empty(0, dtype=torch.int64)], self._group.tables[table].shard_rows
        for start in range(0, places, PLACES_AT_ONCE):
            part = range(start, min(start + PLACES_AT_ONCE, places))
            job = KeyRead(self._group, version, table, part)
            self.reader.carry_on(job, range(SHARDS))
            found += job.found
        return torch.cat(found).sort().values

    def push(self, number: int, update: RowUpdate) -> None:
        """Send update `number` to all servers of this worker's part of the shards, soon."""
        self._kept.keep(number, SentUpdate(self._group.tables, update))
        part = self._access.link.find_part()
        if part is None:
            return  # other workers send it, or a reader gives it
        for server in self.book.list_servers():
            if server not in self._queues:
                self._begin_to_push(server)
        layout = self.book.layout
        for server, waiting in self._queues.items():
            self.book.look_at(server, layout)
            mine = choose_part(self.book.find_shards(server, layout), number, part)
            if mine:
                with suppress(queue.Full):
                    waiting.put_nowait((number, mine))

    def write(self, number: int, update: RowUpdate) -> None:
        """Send update `number`, which writes rows, and wait until all servers have it. UserError.

        Many in a row would leave servers behind that have missed more updates than are kept.
        """
        self.push(number, update)
        read = RowRead(
            self._group, number, [torch.empty(0, dtype=torch.int64) for _ in update.keys]
        )
        self.reader.carry_on(read, range(SHARDS))

    def save(
        self, version: int, step: int, token: str, first: int, parts: Mapping[int, Sequence[int]]
    ) -> None:
        """Order servers to save the rows as of `version`, as shares from number `first` on.

        `parts`: the shards that each server saves, as one share, if it has them. Returns at once.
        """
        args = version, step, token, first, parts
        threading.Thread(target=self._save, args=args, daemon=True).start()

    def _save(
        self, version: int, step: int, token: str, first: int, parts: Mapping[int, Sequence[int]]
    ) -> None:
        """Order the saves once all servers agree about the rows, or not at all."""
        sources = self._compare_all(version)
        if not sources:
            text = f"rows of {self._group.name} are not saved at step {step}: no server has them"
            self._access.link.note(text)
            return
        for share, (server, shards) in enumerate(choose_savers(parts, sources), first):
            request = wire.SaveShards(self._group.name, version, shards, step, token, share)
            threading.Thread(target=self._order_save, args=(server, request), daemon=True).start()

    def _compare_all(self, version: int) -> dict[int, tuple[int, ...]]:
        """Compare all rows as of `version` on all servers, and have wrong ones dropped.

        Returns the servers that have each shard; no server keeps them: some rows are not there.
        """
        reader = RowReader(self._group, self.book, self._kept, _give_up)
        none = [torch.empty(0, dtype=torch.int64) for _ in self._group.tables]
        try:
            for _ in range(SAVE_TRIES):
                with suppress(UserError):
                    read = RowRead(self._group, version, none)
                    reader.carry_on(read, range(SHARDS), waits=False)
                    return read.reading.find_sources()
                time.sleep(SAVE_PAUSE_S)
            return {}
        finally:
            reader.close()

    def _order_save(self, server: int, request: wire.SaveShards) -> None:
        """Order a save, again and again while the server cannot carry it out yet."""
        connection = ServerConnection(self.book, server, self._group)
        for _ in range(SAVE_TRIES):
            with suppress(OSError, WireError, UserError):
                if not connection.order(request).problem:
                    break
            connection.close()
            time.sleep(SAVE_PAUSE_S)
        connection.close()

    # ------------------------------------------------------------ pushing

    def _begin_to_push(self, server: int) -> None:
        """Start the thread that sends a server, or an heir, its updates."""
        self._queues[server] = queue.Queue(QUEUE_MAX)
        name = f"holdfast-rows-{server}"
        threading.Thread(target=self._push_to, args=(server,), name=name, daemon=True).start()

    def _push_to(self, server: int) -> None:
        """Send one server its updates, for ever."""
        connection, told = ServerConnection(self.book, server, self._group, follows=True), ""
        while True:
            number, shards = self._queues[server].get()
            try:
                self._push_one(connection, server, number, shards)
            except (OSError, WireError, UserError) as error:
                connection.close()  # readers give it this update later
                self.book.record_silence(server)
                if isinstance(error, UserError | ServerFull) and told != str(error):
                    told = str(error)
                    self._access.link.note(f"{self.book.name(server)} takes no updates: {told}")

    def _push_one(
        self, connection: ServerConnection, server: int, number: int, shards: tuple[int, ...]
    ) -> None:
        update = self._kept.find(number)
        if update is None:
            return
        answer = connection.give(number, shards, update)
        self.book.tell_of_damage(server, answer)
        where = connection.address, connection.layout
        self.book.record_answer(HolderAnswer(server, *where, shards, answer.standing))
        standing = replace(answer.standing, past=())
        start, holders = self._kept.find_start(number), self.book.find_holders(shards)
        for effect in bring_up(server, number, standing, start, holders):
            if isinstance(effect, Give):
                connection.give_since(effect.after, effect.shards, self._kept)
            elif isinstance(effect, OrderCopy):
                connection.order_copy(effect)


def _give_up(why: str) -> None:
    """Raise UserError, since rows that are to be compared are not waited for."""
    raise UserError(why)
