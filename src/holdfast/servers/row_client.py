"""Reads and updates rows on servers, for one group of tables of a worker.

The script's thread reads; another thread for each server sends it the updates. Whom to ask and what
to give is decided in core/servers/reading.py. Updates are kept for a while, so that a server that
has missed some can be given them.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import UserError, WireError, assert_never
from holdfast.core.servers.holdings import WINDOW
from holdfast.core.servers.placement import SHARDS, choose_part
from holdfast.core.servers.reading import (
    Ask,
    Give,
    Lost,
    OrderCopy,
    OrderLoad,
    OrderReset,
    RowReading,
    RowReadingEffect,
    WaitAgain,
    bring_up,
)
from holdfast.net import peer_stream
from holdfast.servers import server_wire as wire
from holdfast.servers.holder_book import HolderBook
from holdfast.servers.key_batch import SentUpdate
from holdfast.servers.row_reads import KeyRead, Read, RowRead
from holdfast.servers.server_rows import RowUpdate
from holdfast.train.script.row_updates import ServerAccess

KEPT = WINDOW  # updates that a worker keeps, besides those that reads do not know yet
PATIENCE_S = 0.5  # with a server that sends nothing
REACH_S = 0.5  # to connect
BEGIN_S = 120.0  # for a server to fill all its rows with their first values
SUSPECT_S = 2.0  # a server that did not answer is asked last for so long
SAVE_TRIES, SAVE_PAUSE_S = 50, 0.1  # to order a save, since a server may lack an update yet
TOLD_S = 5.0  # a read that waits longer is reported
PAUSE_S = 0.02  # between two rounds in which nobody could answer
Asking: TypeAlias = Ask | Give | OrderCopy | OrderReset | OrderLoad
QUEUE_MAX = 64  # updates that wait for one server; it is given the others as it asks


class _Connection:
    """Keeps a connection to one server, made again when it is needed. Use it in one thread.

    `address`: where the server listened at the last use. `layout`: the number of the layout that it
    was told of. `follows`: it is told of each new one, and the next use waits until it has made
    room for its new shards.
    """

    def __init__(
        self, book: HolderBook, server: int, group: wire.TableGroup, *, follows: bool = False
    ) -> None:
        self._book, self._server, self._group, self._follows = book, server, group, follows
        self._channel: socket.socket | None = None
        self.layout = 0
        self.address = ""

    def open(self) -> socket.socket:
        """Return the connection to a server that knows the group. OSError, WireError, UserError."""
        address = self._book.find_address(self._server)
        if address != self.address:
            self.close()
        if self._channel is None:
            if not address:
                raise ConnectionRefusedError(f"{self._book.name(self._server)} does not run now")
            identity, purpose = self._book.access.identity, (self._server, 0, 0)
            self._channel = peer_stream.connect(
                address, identity, wire.MAGIC, purpose, PATIENCE_S, REACH_S
            )
            self.address = address
            # A request is a message and arrays: none may wait for an acknowledgement.
            self._channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._begin(self._channel)
        elif self._follows and self.layout != self._book.layout.number:
            self._begin(self._channel)
        return self._channel

    def _begin(self, channel: socket.socket) -> None:
        channel.settimeout(BEGIN_S)
        layout = self._book.layout
        self.layout = layout.number
        shards = self._book.find_shards(self._server, layout)
        peer_stream.send_message(channel, wire.BeginGroup(self._group, shards, layout.number))
        answer = peer_stream.receive_message(channel, wire.Answer)
        channel.settimeout(PATIENCE_S)
        if answer.problem:
            raise UserError(answer.problem)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def give(self, number: int, shards: Sequence[int], update: SentUpdate) -> wire.Answer:
        """Send an update of these shards. OSError, WireError, UserError."""
        channel, batch = self.open(), update.batch
        places = batch.find_places(shards)
        request = wire.GiveUpdate(
            self._group.name,
            number,
            tuple(shards),
            batch.count_by_table(places),
            update.steps,
            update.rates,
            max(number - self._group.staleness, 0),
        )
        peer_stream.send_message(channel, request)
        wire.send_array(channel, batch.keys[places])
        wire.send_array(channel, update.pick_grads(places))
        return peer_stream.receive_message(channel, wire.Answer)

    def order(self, request: wire.Order) -> wire.Answer:
        """Send an order. OSError, WireError, UserError."""
        channel = self.open()
        peer_stream.send_message(channel, request)
        return peer_stream.receive_message(channel, wire.Answer)

    def order_copy(self, order: OrderCopy) -> None:
        """Have the server copy shards from another one, unless it is unknown where that listens.

        OSError, WireError, UserError.
        """
        source, name = self._book.find_address(order.source), self._group.name
        if source:
            self.order(wire.FetchShards(name, source, order.shards, order.version))


class _Kept:
    """Keeps a worker's last updates, `most` of them. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._updates: dict[int, SentUpdate] = {}
        self._lock = threading.Lock()

    def keep(self, number: int, update: SentUpdate) -> None:
        with self._lock:
            if number - 1 not in self._updates:
                self._updates.clear()  # the state was received in between
            self._updates[number] = update
            self._updates.pop(number - self._most, None)

    def replace(self, updates: Mapping[int, SentUpdate]) -> None:
        """Keep only these, by their numbers."""
        with self._lock:
            self._updates = dict(updates)

    def find(self, number: int) -> SentUpdate | None:
        """Return an update, if it is kept."""
        with self._lock:
            return self._updates.get(number)

    def find_start(self, version: int) -> int:
        """Return the number after which all updates up to `version` are kept."""
        with self._lock:
            while version in self._updates:
                version -= 1
            return version

    def list_since(self, number: int) -> list[tuple[int, SentUpdate]]:
        """Return all updates after this one."""
        with self._lock:
            return sorted((n, each) for n, each in self._updates.items() if n > number)


class RowClient:
    """Reads and updates the rows of one group. `read` and `push` belong to the script's thread.

    An heir is sent all updates of its server, and its rows are read if the server has none.
    """

    def __init__(self, group: wire.TableGroup, access: ServerAccess) -> None:
        self._group, self._access = group, access
        self.book = HolderBook(group.name, access)
        self._kept = _Kept(KEPT + access.staleness)
        self._reads: dict[int, _Connection] = {}
        self._suspects: dict[int, float] = {}
        # Version and step of the checkpoint that the job has begun from, if it has.
        self._stored: tuple[int, int] | None = None
        self._queues: dict[int, queue.Queue[tuple[int, tuple[int, ...]]]] = {}

    def begin_from(self, version: int, step: int, unread: Iterable[RowUpdate]) -> None:
        """Record that the state has come from the checkpoint of `step`, as has each row.

        `version`: how many updates the rows there have had. `unread`: the updates after these.
        """
        self._stored = version, step
        updates = enumerate(unread, version + 1)
        self._kept.replace({n: SentUpdate(self._group.tables, each) for n, each in updates})

    def read(
        self, version: int, keys: Sequence[torch.Tensor], *, as_half: bool = False
    ) -> list[torch.Tensor]:
        """Return the rows [n, dim] of each table's keys [n] as of `version`. UserError.

        `as_half`: rounded to float16, as which they travel.
        """
        job = RowRead(self._group, version, keys, as_half=as_half)
        self._carry_on(job, job.find_shards())
        return job.rows

    def read_keys(self, version: int, table: int) -> torch.Tensor:
        """Return the keys [n] of a table that have rows as of `version`, in order. UserError."""
        job = KeyRead(self._group, version, table)
        self._carry_on(job, range(SHARDS))
        return torch.cat(job.found).sort().values

    def push(self, number: int, update: RowUpdate) -> None:
        """Send update `number` to all servers of this worker's part of the shards, soon."""
        self._kept.keep(number, SentUpdate(self._group.tables, update))
        part = self._access.find_part()
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

    # ------------------------------------------------------------ reading

    def _carry_on(self, job: Read, shards: Iterable[int]) -> None:
        """Read these shards. UserError."""
        version = job.version
        stored = self._stored[0] if self._stored is not None else None
        job.reading = reading = RowReading(
            version,
            self.book.find_holders(shards),
            self._kept.find_start(version),
            self.find_suspects(),
            stored,
        )
        told_at = time.monotonic() + TOLD_S
        while not reading.is_done:
            if time.monotonic() >= told_at:
                told_at = math.inf
                missing = ", ".join(map(self.book.name, self.find_suspects()))
                self._access.tell(
                    f"rows of {self._group.name} are being waited for since {TOLD_S:g} s: "
                    f"{missing or 'servers that hold them'} do not answer, or are behind"
                )
            effects = reading.next()
            asked = [e for e in effects if isinstance(e, Ask) and self._try(job, e, self._send)]
            job.orders = [e for e in effects if not isinstance(e, Ask)]
            for ask in asked:
                self._try(job, ask, self._receive)
            # Only now, since an order's answer must not be mistaken for one that is on its way.
            for order in job.orders:
                self._carry_out(job, order)

    def _try(self, job: Read, effect: Asking, act: Callable[[Read, Any], None]) -> bool:
        """Do something with a server; return whether it could be done."""
        try:
            act(job, effect)
        except (OSError, WireError):
            self._suspects[effect.server] = time.monotonic() + SUSPECT_S
            self._find_reader(effect.server).close()
            job.reading.record_silence(effect.server)
            return False
        return True

    def _find_reader(self, server: int) -> _Connection:
        """Return the connection of the script's thread to a server."""
        if server not in self._reads:
            self._reads[server] = _Connection(self.book, server, self._group)
        return self._reads[server]

    def _carry_out(self, job: Read, effect: RowReadingEffect) -> None:
        match effect:
            case WaitAgain():
                time.sleep(PAUSE_S)
                job.reading.try_again(self.book.find_holders(job.reading.missing))
            case Lost(shards):
                self._access.lose(
                    f"rows of {self._group.name} are lost: no server that is left has shards "
                    f"{', '.join(map(str, shards))} as they were after {job.version} updates"
                )
            case Give() | OrderCopy() | OrderReset() | OrderLoad():
                self._try(job, effect, self._order)
            case Ask():
                raise AssertionError("asked elsewhere")
            case _:
                assert_never(effect)

    def _order(self, _: Read, effect: Give | OrderCopy | OrderReset | OrderLoad) -> None:
        """Send a server an order, or updates. OSError, WireError, UserError."""
        connection, name = self._find_reader(effect.server), self._group.name
        match effect:
            case Give(_, after, shards):
                self._give(connection, after, shards)
            case OrderCopy():
                connection.order_copy(effect)
            case OrderReset(_, shards):
                connection.order(wire.ResetRows(name, shards))
            case OrderLoad(_, shards):
                assert self._stored is not None, "there is a checkpoint"
                connection.order(wire.LoadShards(name, self._stored[1], shards))

    def save(
        self, version: int, step: int, token: str, first: int, parts: Mapping[int, Sequence[int]]
    ) -> None:
        """Have servers save the rows as of `version`, as shares from number `first` on.

        `parts`: the shards that each server saves, as one share. Returns at once.
        """
        for share, (server, shards) in enumerate(parts.items(), first):
            request = wire.SaveShards(self._group.name, version, tuple(shards), step, token, share)
            threading.Thread(target=self._order_save, args=(server, request), daemon=True).start()

    def _order_save(self, server: int, request: wire.SaveShards) -> None:
        """Order a save, again and again while the server cannot carry it out yet."""
        connection = _Connection(self.book, server, self._group)
        for _ in range(SAVE_TRIES):
            with suppress(OSError, WireError, UserError):
                if not connection.order(request).problem:
                    break
            connection.close()
            time.sleep(SAVE_PAUSE_S)
        connection.close()

    def find_suspects(self) -> list[int]:
        """Return the servers that did not answer lately."""
        now = time.monotonic()
        return [number for number, until in self._suspects.items() if now < until]

    def _send(self, job: Read, ask: Ask) -> None:
        """Ask a server for these shards. OSError, WireError, UserError."""
        job.send(self._find_reader(ask.server).open(), ask.shards)

    def _receive(self, job: Read, ask: Ask) -> None:
        """Receive an answer, and what comes with it. OSError, WireError, UserError."""
        channel, reading = self._find_reader(ask.server).open(), job.reading
        answer = peer_stream.receive_message(channel, wire.Answer)
        if answer.unknown:
            raise WireError("the server does not know these tables any more")
        self._tell_of_damage(ask.server, answer)
        if not answer.standing.can_serve:
            job.orders += reading.record_refusal(ask.server, ask.shards, answer.standing)
            return
        job.receive(channel, answer, ask.shards)
        job.orders += reading.record_answer(ask.server, ask.shards)

    def _tell_of_damage(self, server: int, answer: wire.Answer) -> None:
        if answer.dropped:
            shards = ", ".join(map(str, answer.dropped))
            self._access.tell(
                f"{self.book.name(server)}: memory with rows of {self._group.name} "
                "has changed by itself; "
                f"the server drops shards {shards} and gets them again"
            )

    def _give(self, to: _Connection, after: int, shards: Sequence[int]) -> None:
        for number, update in self._kept.list_since(after):
            to.give(number, shards, update)

    # ------------------------------------------------------------ pushing

    def _begin_to_push(self, server: int) -> None:
        """Start the thread that sends a server, or an heir, its updates."""
        self._queues[server] = queue.Queue(QUEUE_MAX)
        name = f"holdfast-rows-{server}"
        threading.Thread(target=self._push_to, args=(server,), name=name, daemon=True).start()

    def _push_to(self, server: int) -> None:
        """Send one server its updates, for ever."""
        connection, told = _Connection(self.book, server, self._group, follows=True), ""
        while True:
            number, shards = self._queues[server].get()
            try:
                self._push_one(connection, server, number, shards)
            except (OSError, WireError, UserError) as error:
                connection.close()  # readers give it this update later
                self.book.record_silence(server)
                if isinstance(error, UserError) and told != str(error):
                    told = str(error)
                    self._access.tell(f"{self.book.name(server)} takes no updates: {told}")

    def _push_one(
        self, connection: _Connection, server: int, number: int, shards: tuple[int, ...]
    ) -> None:
        update = self._kept.find(number)
        if update is None:
            return
        answer = connection.give(number, shards, update)
        self._tell_of_damage(server, answer)
        where = connection.address, connection.layout
        self.book.record_answer(server, *where, shards, answer.standing)
        standing = replace(answer.standing, past=())
        start, holders = self._kept.find_start(number), self.book.find_holders(shards)
        for effect in bring_up(server, number, standing, start, holders):
            if isinstance(effect, Give):
                self._give(connection, effect.after, effect.shards)
            elif isinstance(effect, OrderCopy):
                connection.order_copy(effect)
