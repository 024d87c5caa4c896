"""Describes a read of rows, or of the keys that have rows, and keeps the answers of servers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.servers.reading import Ask, RowReading, RowReadingEffect
from holdfast.engine.net import peer_stream
from holdfast.tables import server_wire as wire
from holdfast.tables.key_batch import KeyBatch


class Read(Protocol):
    """Asks for something as of a version; `reading` decides whom to ask.

    `orders`: to carry out once no answer is on its way.
    """

    version: int
    reading: RowReading
    orders: list[RowReadingEffect]

    def send(self, channel: socket.socket, ask: Ask) -> None:
        """Ask a server. OSError."""

    def receive(self, channel: socket.socket, answer: wire.Answer, shards: tuple[int, ...]) -> None:
        """Receive the arrays that follow an answer. OSError, WireError."""


class RowRead:
    """Reads the rows [n, dim] of each table's keys [n]; `as_half`: rounded to float16."""

    def __init__(
        self,
        group: wire.TableGroup,
        version: int,
        keys: Sequence[torch.Tensor],
        *,
        as_half: bool = False,
    ) -> None:
        self.version, self._group, self._as_half = version, group, as_half
        self._batch = KeyBatch(group.tables, keys)
        self.orders: list[RowReadingEffect] = []
        self._found = [torch.empty(run.stop - run.start, run.dim) for run in self._batch.runs]
        self.reading: RowReading

    @property
    def rows(self) -> list[torch.Tensor]:
        """Return the rows of each table, once all are there."""
        pairs = zip(self._found, self._batch.runs, strict=True)
        sizes = self._batch.sizes
        return [t for found, run in pairs for t in found.split([sizes[i] for i in run.tables])]

    def find_shards(self) -> list[int]:
        """Return the shards that the keys are in."""
        return self._batch.find_shards()

    def send(self, channel: socket.socket, ask: Ask) -> None:
        """Ask for the rows of those keys that are in the wanted shards. OSError."""
        places = self._batch.find_places(ask.shards)
        counts = self._batch.count_by_table(places)
        request = wire.ReadRows(
            self._group.name, self.version, ask.shards, counts, self._as_half, ask.compared
        )
        peer_stream.send_message(channel, request)
        wire.send_array(channel, self._batch.keys[places])

    def receive(self, channel: socket.socket, answer: wire.Answer, shards: tuple[int, ...]) -> None:
        """Receive these rows. OSError, WireError."""
        places = self._batch.find_places(shards)
        counts, tables = self._batch.count_by_table(places), self._group.tables
        sizes = tuple(n * shape.dim for n, shape in zip(counts, tables, strict=True))
        if answer.sizes != sizes:
            raise WireError("the server has sent rows of other sizes")
        sent_as = torch.float16 if self._as_half else torch.float32
        rest = wire.receive_array(channel, (sum(sizes),), sent_as).float()
        for rows, at in zip(self._found, self._batch.split_places(places), strict=True):
            part, rest = rest.tensor_split([at.shape[0] * rows.shape[1]])
            rows.index_copy_(0, at, part.view(-1, rows.shape[1]))


class KeyRead:
    """Reads which keys of one table have rows, at some places of each shard.

    `found`: some for each answer.
    """

    def __init__(self, group: wire.TableGroup, version: int, table: int, part: range) -> None:
        self.version, self._group, self._table, self._part = version, group.name, table, part
        self.orders: list[RowReadingEffect] = []
        self.found: list[torch.Tensor] = []
        self.reading: RowReading

    def send(self, channel: socket.socket, ask: Ask) -> None:
        """Ask for the keys in the wanted shards. OSError."""
        places = self._part.start, self._part.stop
        request = wire.ListKeys(
            self._group, self.version, ask.shards, self._table, *places, ask.compared
        )
        peer_stream.send_message(channel, request)

    def receive(self, channel: socket.socket, answer: wire.Answer, shards: tuple[int, ...]) -> None:
        """Receive these keys. OSError, WireError."""
        if len(answer.sizes) != 1:
            raise WireError("the server has sent no keys")
        self.found.append(wire.receive_array(channel, answer.sizes, torch.int64))
