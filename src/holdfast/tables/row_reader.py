"""Reads rows of one group of tables from servers, for one thread of a worker.

Which servers to ask, which updates to give and whose answer to believe is decided in
core/reading.py. When servers hold different rows, the referee finds the right ones:
servers that agree about the rows before an update can disagree about those after it only if one of
them has computed wrongly. So the worker gets the rows on which they agree, applies the updates
itself, which it keeps, and believes the servers with the same result.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from holdfast.engine.core.errors import UserError, WireError, assert_never
from holdfast.engine.net import peer_stream
from holdfast.tables import server_wire as wire
from holdfast.tables.core.reading import (
    Ask,
    FindRight,
    Give,
    Lost,
    OrderCopy,
    OrderDrop,
    OrderLoad,
    OrderReset,
    RowReading,
    RowReadingEffect,
    WaitAgain,
    can_begin_from,
    find_common,
)
from holdfast.tables.server_connection import (
    HolderBook,
    KeptUpdates,
    KeyBatch,
    ServerConnection,
    ServerFull,
)
from holdfast.tables.server_group import ServerGroup, ShardRows, fill_shard
from holdfast.tables.serving import fetch_shard

SUSPECT_S = 2.0  # a server that did not answer is asked last for so long
TOLD_S = 5.0  # a read that waits longer is reported
PAUSE_S = 0.02  # between two rounds without any answer
Order: TypeAlias = Give | OrderCopy | OrderDrop | OrderReset | OrderLoad


class RowRead:
    """Reads the rows [n, dim] of each table's keys [n]; `as_half`: rounded to float16.

    `reading` decides whom to ask. `orders`: to carry out once no answer is on its way.
    """

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


Read: TypeAlias = RowRead | KeyRead


class RowReader:
    """Reads rows over connections of its own; belongs to one thread.

    `lose`: called with a sentence if rows are lost; does not return. `stored`: the version and the
    step of the checkpoint from which the job has begun, if there is one.
    """

    def __init__(
        self,
        group: wire.TableGroup,
        book: HolderBook,
        kept: KeptUpdates,
        lose: Callable[[str], object],
    ) -> None:
        self._group, self._book, self._kept, self._lose = group, book, kept, lose
        self.stored: tuple[int, int] | None = None
        self._connections: dict[int, ServerConnection] = {}
        # Servers that did not answer: where they listened, and until when they are asked last.
        self._suspects: dict[int, tuple[str, float]] = {}
        # Servers without memory for the tables: the addresses at which they listened, and their
        # answers.
        self._full: dict[int, tuple[str, str]] = {}
        # Shards by the servers that drop them, and whether these are known to be wrong.
        self._dropped: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        self._referee = RowReferee(group, kept, self._find_connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()

    def find_suspects(self) -> list[int]:
        """Return the servers that did not answer lately, at the address that they still have."""
        now, find = time.monotonic(), self._book.find_address
        suspects = self._suspects.items()
        return [n for n, (address, until) in suspects if now < until and find(n) == address]

    def carry_on(self, job: Read, shards: Iterable[int], *, waits: bool = True) -> None:
        """Read these shards. UserError.

        `waits`: until servers have them; otherwise they are lost at once, and no server is made to
        begin again.
        """
        version = job.version
        job.reading = reading = RowReading(
            version,
            self._book.find_holders(shards),
            self._kept.find_start(version),
            self.find_suspects(),
            self.stored[0] if self.stored is not None else None,
            self._book.access.link.settings.replicas,
            waits=waits,
        )
        told_at = time.monotonic() + TOLD_S
        while not reading.is_done:
            if time.monotonic() >= told_at:
                told_at = math.inf
                missing = [self._book.name(server) for server in self.find_suspects()]
                silent = ", ".join(missing) or "servers that hold them"
                verbs = "does not answer, or has" if len(missing) == 1 else "do not answer, or have"
                self._book.access.link.note(
                    f"rows of {self._group.name} are being waited for since {TOLD_S:g} s: "
                    f"{silent} {verbs} no rows yet"
                )
            effects = reading.next()
            asked = [e for e in effects if isinstance(e, Ask) and self._try(job, e, self._send)]
            job.orders = [e for e in effects if not isinstance(e, Ask)]
            for ask in asked:
                self._try(job, ask, self._receive)
            # Only now: an order's answer must not be mistaken for an answer that is on its way.
            for order in job.orders:
                self._carry_out(job, order)
            self._tell_of_drops(job)

    def _try(self, job: Read, effect: Ask | Order, act: Callable[[Read, Any], None]) -> bool:
        """Do something with a server; return whether it could be done."""
        try:
            act(job, effect)
        except (OSError, WireError) as error:
            server = effect.server
            address = self._book.find_address(server)
            self._suspects[server] = address, time.monotonic() + SUSPECT_S
            self._find_connection(server).close()
            if isinstance(error, ServerFull):
                self._full[server] = address, str(error)
                job.reading.record_full(server)
            else:
                self._full.pop(server, None)
                job.reading.record_silence(server)
            return False
        self._full.pop(effect.server, None)
        return True

    def _find_connection(self, server: int) -> ServerConnection:
        """Return the connection to a server."""
        if server not in self._connections:
            self._connections[server] = ServerConnection(self._book, server, self._group)
        return self._connections[server]

    def _carry_out(self, job: Read, effect: RowReadingEffect) -> None:
        match effect:
            case WaitAgain():
                holders = self._book.find_holders(job.reading.missing)
                self._check_room(holders.values())
                time.sleep(PAUSE_S)
                job.reading.try_again(holders)
            case Lost(shards):
                self._tell_of_drops(job)
                self._lose(
                    f"rows of {self._group.name} are lost: no server that is left has shards "
                    f"{', '.join(map(str, shards))} as they were after {job.version} updates"
                )
            case FindRight():
                self._settle(job, effect)
            case Give() | OrderCopy() | OrderDrop() | OrderReset() | OrderLoad():
                self._try(job, effect, self._order)
            case Ask():
                raise AssertionError("asked elsewhere")
            case _:
                assert_never(effect)

    def _check_room(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise UserError if no server has memory for some rows. `holders`: of each shard."""
        find = self._book.find_address
        full = {n: text for n, (address, text) in self._full.items() if find(n) == address}
        for servers in holders:
            if servers and all(server in full for server in servers):
                raise UserError(full[servers[0]])

    def _settle(self, job: Read, dispute: FindRight) -> None:
        """Find the servers that are right about a shard, and order the wrong ones to drop it."""
        claims, right = self._referee.judge(dispute, job.version)
        wrong = tuple(server for server, claim in claims.items() if claim != right)
        if wrong:
            self._dropped.setdefault((wrong, right is not None), []).append(dispute.shard)
        for order in job.reading.settle(dispute.shard, claims, right):
            self._carry_out(job, order)

    def _tell_of_drops(self, job: Read) -> None:
        """Report the servers that drop wrong rows, once for all shards."""
        dropped, self._dropped = self._dropped, {}
        for (servers, is_known), shards in dropped.items():
            named, listed = " and ".join(map(self._book.name, servers)), ", ".join(map(str, shards))
            acts = (
                ("has", "it drops", "gets") if len(servers) == 1 else ("have", "they drop", "get")
            )
            rows = f"rows of {self._group.name}"
            seen = f"seen after {job.version} updates, shards {listed}"
            self._book.access.link.note(
                f"{named} {acts[0]} computed {rows} wrongly ({seen}): {acts[1]} these, and "
                f"{acts[2]} them from another server"
                if is_known
                else f"{named} have different {rows} ({seen}), and nobody can say whose are right: "
                "all drop them"
            )

    def _order(self, _: Read, effect: Order) -> None:
        """Send a server an order, or updates. OSError, WireError, UserError."""
        connection, name = self._find_connection(effect.server), self._group.name
        match effect:
            case Give(_, after, shards):
                connection.give_since(after, shards, self._kept)
            case OrderCopy():
                connection.order_copy(effect)
            case OrderDrop(_, shard, version, fingerprint):
                connection.order(wire.DropShard(name, shard, version, fingerprint))
            case OrderReset(_, shards):
                connection.order(wire.ResetRows(name, shards))
            case OrderLoad(_, shards):
                assert self.stored is not None, "there is a checkpoint"
                version, step = self.stored
                connection.order(wire.LoadShards(name, step, shards, version))
            case _:
                assert_never(effect)

    def _send(self, job: Read, ask: Ask) -> None:
        """Ask a server for these shards. OSError, WireError, UserError."""
        job.send(self._find_connection(ask.server).open(), ask)

    def _receive(self, job: Read, ask: Ask) -> None:
        """Receive an answer and its arrays. OSError, WireError, UserError."""
        channel, reading = self._find_connection(ask.server).open(), job.reading
        answer = peer_stream.receive_message(channel, wire.Answer)
        if answer.unknown:
            raise WireError("the server does not know these tables any more")
        self._book.tell_of_damage(ask.server, answer)
        every = (*ask.shards, *ask.compared)
        if not answer.standing.can_serve:
            job.orders += reading.record_refusal(ask.server, every, answer.standing)
            return
        if len(answer.fingerprints) != len(every):
            raise WireError("the server has sent fingerprints of other shards")
        job.receive(channel, answer, ask.shards)
        claims = dict(zip(every, answer.fingerprints, strict=True))
        job.orders += reading.record_answer(ask.server, ask.shards, claims)


class RowReferee:
    """Settles disputes of one group's servers. `connect`: returns the connection to a server."""

    def __init__(
        self,
        group: wire.TableGroup,
        kept: KeptUpdates,
        connect: Callable[[int], ServerConnection],
    ) -> None:
        self._group, self._kept, self._connect = group, kept, connect

    def judge(self, dispute: FindRight, version: int) -> tuple[dict[int, int], int | None]:
        """Return the servers' fingerprints of a shard as of `version`, and which one is right.

        They are asked again: one may have dropped its rows in between, or have other ones. None:
        that is impossible.
        """
        shard, claims, heard = dispute.shard, dict[int, int](), dict[int, int]()
        for server, before in dispute.claims:
            answer = self._ask(server, shard, version)
            if answer is None:
                heard[server] = before  # the server is silent
            elif answer.fingerprints:
                claims[server] = heard[server] = answer.fingerprints[0]
        if not claims:
            return claims, None
        right = self._compute(shard, heard, list(claims), version)
        said = [*heard.values(), *(claim for _, claim in dispute.claims)]
        return claims, right if right is not None else find_common(said)

    def _compute(
        self, shard: int, heard: dict[int, int], servers: list[int], version: int
    ) -> int | None:
        """Return the fingerprint that this worker computes, from rows on which servers agree."""
        first = self._kept.find_start(version)
        start, sources = 0, dict[int, int]()
        for earlier in range(version - 1, first - 1, -1):
            answers = {server: self._ask(server, shard, earlier) for server in servers}
            known = {n: a.fingerprints[0] for n, a in answers.items() if a and a.fingerprints}
            if can_begin_from(known, heard):
                start, sources = earlier, known
                break
        if not sources and first > 0:
            return None
        own = ServerGroup(self._group, (shard,))
        if start == 0:
            fill_shard(own, shard)
        elif not any(self._copy(own, n, shard, start, sources[n]) for n in sources):
            return None
        for number, update in self._kept.list_since(start):
            if number <= version:
                own.update(number, (shard,), update.pick_update([shard]))
        return _read(own, shard, version)

    def _ask(self, server: int, shard: int, version: int) -> wire.Answer | None:
        """Ask for a server's fingerprint of a shard as of `version`; None: it does not answer."""
        none = (0,) * len(self._group.tables)
        connection = self._connect(server)
        try:
            channel = connection.open()
            request = wire.ReadRows(self._group.name, version, (), none, compared=(shard,))
            peer_stream.send_message(channel, request)
            return peer_stream.receive_message(channel, wire.Answer)
        except (OSError, WireError, UserError):
            connection.close()
            return None

    def _copy(
        self, own: ServerGroup, server: int, shard: int, version: int, fingerprint: int
    ) -> bool:
        """Get a shard as of `version` from a server; return whether it has this fingerprint."""
        connection = self._connect(server)
        with suppress(OSError, WireError, UserError):
            fetch_shard(connection.open(), own, shard, version)
            return _read(own, shard, version) == fingerprint
        connection.close()
        return False


def _read(group: ServerGroup, shard: int, version: int) -> int | None:
    """Return the fingerprint of a shard of this process's own, if it has that version."""
    none = [torch.empty(0, dtype=torch.int64) for _ in group.group.tables]
    found = group.read(version, [], none, [shard])
    return found.fingerprints[0] if isinstance(found, ShardRows) else None
