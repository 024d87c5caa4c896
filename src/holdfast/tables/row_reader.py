"""Reads rows of one group of tables from servers, for one thread of a worker.

Whom to ask, what to give and whom to believe is decided in engine/core/servers/reading.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from holdfast.engine.core.errors import UserError, WireError, assert_never
from holdfast.engine.core.servers.reading import (
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
)
from holdfast.engine.net import peer_stream
from holdfast.tables import server_wire as wire
from holdfast.tables.holder_book import HolderBook
from holdfast.tables.kept_updates import KeptUpdates
from holdfast.tables.row_reads import Read
from holdfast.tables.row_referee import RowReferee
from holdfast.tables.server_connection import ServerConnection, ServerFull

SUSPECT_S = 2.0  # a server that did not answer is asked last for so long
TOLD_S = 5.0  # a read that waits longer is reported
PAUSE_S = 0.02  # between two rounds without any answer
Order: TypeAlias = Give | OrderCopy | OrderDrop | OrderReset | OrderLoad


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
        # Servers without memory for the tables: where they listened, and what they said.
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
            self._book.access.replicas,
            waits=waits,
        )
        told_at = time.monotonic() + TOLD_S
        while not reading.is_done:
            if time.monotonic() >= told_at:
                told_at = math.inf
                missing = [self._book.name(server) for server in self.find_suspects()]
                silent = ", ".join(missing) or "servers that hold them"
                verbs = "does not answer, or has" if len(missing) == 1 else "do not answer, or have"
                self._book.access.tell(
                    f"rows of {self._group.name} are being waited for since {TOLD_S:g} s: "
                    f"{silent} {verbs} no rows yet"
                )
            effects = reading.next()
            asked = [e for e in effects if isinstance(e, Ask) and self._try(job, e, self._send)]
            job.orders = [e for e in effects if not isinstance(e, Ask)]
            for ask in asked:
                self._try(job, ask, self._receive)
            # Only now, since an order's answer must not be mistaken for one that is on its way.
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
        """Find the servers that are right about a shard, and let the others drop it."""
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
            self._book.access.tell(
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
