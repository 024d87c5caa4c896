"""Keeps a connection to one server of tables, over which a worker sends updates and orders."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.core.servers.reading import OrderCopy
from holdfast.engine.net import peer_stream
from holdfast.tables import server_wire as wire
from holdfast.tables.holder_book import HolderBook
from holdfast.tables.kept_updates import KeptUpdates
from holdfast.tables.key_batch import SentUpdate

PATIENCE_S = 0.5  # with a server that sends nothing
REACH_S = 0.5  # to connect
UNTOLD = -1  # stands for the number of a layout


class ServerFull(WireError):
    """Says that a server has no memory for the tables, so others have to answer in its place.

    Over connections that follow the layout: or no memory for the rows of a new one.
    """


class ServerConnection:
    """Keeps a connection to one server, made again when it is needed. Use it in one thread.

    `address`: where the server listened at the last use. `layout`: the number of the layout that it
    was told of. `follows`: it is told of each new one.
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
            identity, purpose = self._book.access.identity, (self._server, 0, 0)
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
        """Have the server copy shards from another one, unless it is unknown where that listens.

        OSError, WireError, UserError.
        """
        source, name = self._book.find_address(order.source), self._group.name
        if source:
            self.order(wire.FetchShards(name, source, order.shards, order.version))
