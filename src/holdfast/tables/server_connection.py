"""Keeps a worker's connection to one server of tables, which sends it updates and orders.

All connections of a group share some records. `HolderBook` knows which servers hold which shards of
the group, and where they listen; the heir of a server, a second process of it on another node, has
the number HEIRS plus the server's. `KeptUpdates` has the worker's last updates, for servers that
have missed some. `KeyBatch` has the keys of all tables of the group in one array, so that few
operations handle them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.net import peer_stream
from holdfast.tables import server_wire as wire
from holdfast.tables.core.heirs import HolderAnswer
from holdfast.tables.core.holdings import ShardStanding
from holdfast.tables.core.placement import HEIRS, SHARDS, add_heirs, find_shards, lay_out
from holdfast.tables.core.reading import OrderCopy
from holdfast.tables.server_access import ServerAccess
from holdfast.tables.server_rows import RowUpdate, number_tables
from holdfast.tables.server_wire import Answer
from holdfast.tables.table_shape import TableShape, mark_shards

#: A worker waits this long for a server that is silent.
PATIENCE_S = 0.5
REACH_S = 0.5  # to connect
UNTOLD = -1  # stands for the number of a layout


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


class ServerFull(WireError):
    """Is raised for a server without memory for the tables: other servers have to answer in its
    place.

    Over connections that follow the layout: or no memory for the rows of a new one.
    """


class ServerConnection:
    """Keeps a connection to one server, made again when it is needed. Use it in one thread.

    `address`: where the server listened at the last use. `layout`: the number of the layout that
    the server has received. `follows`: it receives each new one.
    """

    def __init__(
        self, book: HolderBook, server: int, group: wire.TableGroup, *, follows: bool = False
    ) -> None:
        self._book, self._server, self._group, self._follows = book, server, group, follows
        self._channel: socket.socket | None = None
        self.layout = UNTOLD
        self.address = ""

    def open(self) -> socket.socket:
        """Return the connection to a server that knows the group. OSError, WireError, UserError."""
        address = self._book.find_address(self._server)
        if address != self.address:
            self.close()
        if self._channel is None:
            if not address:
                raise ConnectionRefusedError(f"{self._book.name(self._server)} does not run now")
            identity, purpose = self._book.access.link.identity, (self._server, 0, 0)
            self._channel = peer_stream.connect(
                address, identity, wire.MAGIC, purpose, PATIENCE_S, REACH_S
            )
            self.address = address
            # A request is a message and arrays: none may wait for an acknowledgement.
            self._channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.layout = UNTOLD
        is_new = self.layout != self._book.layout.number
        if self.layout == UNTOLD or (self._follows and is_new):
            self._begin(self._channel)
        return self._channel

    def _begin(self, channel: socket.socket) -> None:
        layout = self._book.layout
        shards = self._book.find_shards(self._server, layout)
        peer_stream.send_message(channel, wire.BeginGroup(self._group, shards, layout.number))
        answer = peer_stream.receive_message(channel, wire.Answer)
        if answer.is_full and (answer.unknown or self._follows):
            raise ServerFull(answer.problem)
        if answer.problem and not answer.is_full:
            raise UserError(answer.problem)
        self.layout = layout.number

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
            update.writes,
        )
        peer_stream.send_message(channel, request)
        wire.send_array(channel, batch.keys[places])
        wire.send_array(channel, update.pick_grads(places))
        return peer_stream.receive_message(channel, wire.Answer)

    def give_since(self, after: int, shards: Sequence[int], kept: KeptUpdates) -> None:
        """Send all updates of these shards that are kept and follow `after`. As `give` does."""
        for number, update in kept.list_since(after):
            self.give(number, shards, update)

    def order(self, request: wire.Order) -> wire.Answer:
        """Send an order. OSError, WireError, UserError."""
        channel = self.open()
        peer_stream.send_message(channel, request)
        return peer_stream.receive_message(channel, wire.Answer)

    def order_copy(self, order: OrderCopy) -> None:
        """Order the server to copy shards from another one, unless that one's address is unknown.

        OSError, WireError, UserError.
        """
        source, name = self._book.find_address(order.source), self._group.name
        if source:
            self.order(wire.FetchShards(name, source, order.shards, order.version))


class HolderBook:
    """Looks up servers and heirs, and passes on how far new ones are. Threads may share it."""

    def __init__(self, group: str, access: ServerAccess) -> None:
        self.access, self._group = access, group
        access.add_group(group)

    @property
    def layout(self) -> ServerLayout:
        """Return the newest layout."""
        return self.access.layout

    def name(self, server: int) -> str:
        """Return the name of a server or an heir in a sentence."""
        return f"server {server}" if server < HEIRS else f"server {server - HEIRS}'s heir"

    def find_address(self, server: int) -> str:
        """Return the address of a server or an heir; empty: that is not known."""
        if server < HEIRS:
            return self.access.link.find_address(server)
        return self.access.link.find_heir(server - HEIRS)

    def find_shards(self, server: int, layout: ServerLayout) -> tuple[int, ...]:
        """Return the shards that a server, or an heir, is to hold in this layout."""
        return find_shards(server % HEIRS, lay_out(layout, self.access.link.settings.replicas))

    def list_servers(self) -> list[int]:
        """Return the numbers of all servers, and of the heirs that there are now."""
        count = self.layout.servers
        return [*range(count), *self._list_heirs(count)]

    def find_holders(self, shards: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return which servers hold these shards now, and after them the heirs of these servers."""
        layout = self.layout
        holders = lay_out(layout, self.access.link.settings.replicas)
        return add_heirs(holders, shards, self._list_heirs(layout.servers))

    def look_at(self, server: int, layout: ServerLayout) -> None:
        """Report a process that needs no rows in this layout, or forget one that has ended."""
        address = self.find_address(server)
        if not address:
            self.record_silence(server)
        elif not self.find_shards(server, layout):
            self.record_answer(HolderAnswer(server, address, layout.number, (), ShardStanding()))

    def record_answer(self, answer: HolderAnswer) -> None:
        """Record how far a server or an heir is after an update of some shards."""
        self.access.record_answer(self._group, answer)

    def record_silence(self, server: int) -> None:
        """Record that a server or an heir has not answered an update."""
        self.access.record_silence(self._group, server)

    def tell_of_damage(self, server: int, answer: Answer) -> None:
        """Report the shards that a server has dropped, by its answer."""
        if answer.dropped:
            shards = ", ".join(map(str, answer.dropped))
            self.access.link.note(
                f"{self.name(server)}: memory with rows of {self._group} has changed by itself; "
                f"the server drops shards {shards} and gets them again"
            )

    def _list_heirs(self, servers: int) -> list[int]:
        return [HEIRS + n for n in range(servers) if self.access.link.find_heir(n)]


class KeptUpdates:
    """Keeps a worker's last updates, `most` of them. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._updates: dict[int, SentUpdate] = {}
        self._lock = threading.Lock()

    def keep(self, number: int, update: SentUpdate) -> None:
        """Keep one more update, and drop the oldest if they are too many."""
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
