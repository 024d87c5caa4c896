"""Describes a read of rows, or of the keys that have rows, and keeps the answers of servers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.core.errors import WireError
from holdfast.core.servers.placement import SHARDS
from holdfast.core.servers.reading import RowReading, RowReadingEffect
from holdfast.net import peer_stream
from holdfast.servers import server_wire as wire


class Read(Protocol):
    """Asks for something as of a version; `reading` decides whom to ask.

    `orders`: to carry out once no answer is on its way.
    """

    version: int
    reading: RowReading
    orders: list[RowReadingEffect]

    def send(self, channel: socket.socket, shards: tuple[int, ...]) -> None:
        """Ask a server for these shards. OSError."""

    def receive(self, channel: socket.socket, answer: wire.Answer, shards: tuple[int, ...]) -> None:
        """Receive the arrays that follow an answer. OSError, WireError."""


class RowRead:
    """Reads the rows [n, dim] of each table's keys [n]."""

    def __init__(
        self,
        group: wire.TableGroup,
        version: int,
        keys: Sequence[torch.Tensor],
    ) -> None:
        self.version, self._group, self._keys = version, group, keys
        self.orders: list[RowReadingEffect] = []
        pairs = zip(keys, group.tables, strict=True)
        self.rows = [torch.empty(len(each), shape.dim) for each, shape in pairs]
        self.reading: RowReading

    def find_shards(self) -> list[int]:
        """Return the shards that the keys are in."""
        used = torch.zeros(SHARDS, dtype=torch.bool)
        for shape, each in zip(self._group.tables, self._keys, strict=True):
            used[shape.shards_of(each)] = True
        found: list[int] = used.nonzero().flatten().tolist()
        return found

    def send(self, channel: socket.socket, shards: tuple[int, ...]) -> None:
        """Ask for the rows of those keys that are in these shards. OSError."""
        pairs = zip(self._keys, self._find(shards), strict=True)
        keys = [each[places] for each, places in pairs]
        counts = tuple(len(each) for each in keys)
        request = wire.ReadRows(self._group.name, self.version, shards, counts)
        peer_stream.send_message(channel, request)
        wire.send_array(channel, torch.cat(keys))

    def receive(self, channel: socket.socket, answer: wire.Answer, shards: tuple[int, ...]) -> None:
        """Receive these rows. OSError, WireError."""
        found = self._find(shards)
        sizes = [len(at) * s.dim for at, s in zip(found, self._group.tables, strict=True)]
        if answer.sizes != tuple(sizes):
            raise WireError("the server has sent rows of other sizes")
        parts = wire.receive_array(channel, (sum(sizes),)).split(sizes)
        for rows, places, part in zip(self.rows, found, parts, strict=True):
            rows[places] = part.view(-1, rows.shape[1])

    def _find(self, shards: Sequence[int]) -> list[torch.Tensor]:
        """Return where the keys of these shards are, for each table."""
        pairs = zip(self._group.tables, self._keys, strict=True)
        return [shape.are_in(shards, each).nonzero().flatten() for shape, each in pairs]


class KeyRead:
    """Reads which keys of one table have rows; `found`: some for each answer."""

    def __init__(self, group: wire.TableGroup, version: int, table: int) -> None:
        self.version, self._group, self._table = version, group.name, table
        self.orders: list[RowReadingEffect] = []
        self.found: list[torch.Tensor] = []
        self.reading: RowReading

    def send(self, channel: socket.socket, shards: tuple[int, ...]) -> None:
        """Ask for the keys in these shards. OSError."""
        request = wire.ListKeys(self._group, self.version, shards, self._table)
        peer_stream.send_message(channel, request)

    def receive(self, channel: socket.socket, answer: wire.Answer, shards: tuple[int, ...]) -> None:
        """Receive these keys. OSError, WireError."""
        if len(answer.sizes) != 1:
            raise WireError("the server has sent no keys")
        self.found.append(wire.receive_array(channel, answer.sizes, torch.int64))
