"""Serves rows of tables to the workers of a job, in a process of its own.

Each connection has a thread. What a request changes is decided by the group's machine; this module
only moves bytes. Whoever connects has proved that it is of the job.
"""

from __future__ import annotations

import functools
import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from holdfast.engine.core.errors import UserError, WireError, WorldError, assert_never
from holdfast.engine.core.job_spec import STALENESS_MAX
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import PeerListener, serve
from holdfast.engine.net.peer_stream import UNLIMITED, SendRate
from holdfast.engine.net.tls import PeerIdentity
from holdfast.tables import server_wire as wire
from holdfast.tables.core.holdings import (
    CopyArrived,
    CopyFailed,
    CopyOffered,
    ShardStanding,
)
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.server_group import Pin, ServerGroup, check_same, fill_shard
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.table_store import TableStore

SCRUB_EVERY_S = 0.5  # between two looks at a part of the rows
SCRUB_ROUNDS = 1200  # after which every row was looked at: ten minutes
FETCH_S = 20.0  # a server that a shard is copied from may be silent up to this long
GROUPS_MAX = 1 << 12
REQUEST: Any = wire.Request  # the type of all of them

# Gives a group these shards, and yields each once it has come.
BringShards = Callable[[ServerGroup, Sequence[int]], Iterable[int]]


class RowServer:
    """Serves one server's shards. `say`: gets lines for the server's log.

    `store`: where rows are saved; None: nowhere. `rate`: of copies for servers that need the rows.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        say: Callable[[str], None],
        store: TableStore | None = None,
        rate: SendRate = UNLIMITED,
    ) -> None:
        self._identity = identity
        self._store, self._rate = store, rate
        self._say = say
        self._groups: dict[str, ServerGroup] = {}
        self._lock = threading.Lock()
        self._listener: PeerListener | None = None
        self._channels: list[socket.socket] = []
        self._closed = threading.Event()

    def listen(self, host: str) -> str:
        """Begin to serve; returns the address to announce. OSError, UserError."""
        address, self._listener = serve(host, self._identity, wire.MAGIC, self._serve, self._say)
        threading.Thread(target=self._scrub, name="holdfast-scrub", daemon=True).start()
        return address

    def close(self) -> None:
        """Stop serving, as if the server's process had ended."""
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            for channel in self._channels:
                with suppress(OSError):  # it is closed already
                    channel.shutdown(socket.SHUT_RDWR)

    def _serve(self, channel: socket.socket, _: peer_stream.Purpose) -> None:
        # An answer is a message and an array: neither may wait for an acknowledgement.
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._channels.append(channel)
        try:
            while not self._closed.is_set():
                request: wire.Request = peer_stream.receive_message(channel, REQUEST)
                self._answer(channel, request)
        finally:
            with self._lock:
                self._channels.remove(channel)

    def _answer(self, channel: socket.socket, request: wire.Request) -> None:
        """Answer one request. OSError; WireError ends the connection."""
        if isinstance(request, wire.BeginGroup):
            peer_stream.send_message(channel, self._begin(request))
            return
        group = self._groups.get(request.group)
        match request:
            case wire.ReadRows():
                self._read(channel, group, request)
            case wire.GiveUpdate():
                self._update(channel, group, request)
            case wire.ListKeys():
                self._list_keys(channel, group, request)
            case wire.CopyShard():
                self._copy(channel, group, request)
            case wire.DropShard(_, shard, version, fingerprint):
                if group is not None:
                    group.drop_wrong(shard, version, fingerprint)
                peer_stream.send_message(channel, wire.Answer(unknown=group is None))
            case wire.SaveShards():
                self._begin_save(channel, group, request)
            case wire.FetchShards(_, source, shards, version):
                fetch = functools.partial(self._fetch_all, source)
                offered = CopyOffered(shards, version)
                self._begin_copies(channel, group, offered, source, fetch)
            case wire.LoadShards(_, step, shards, version):
                load = functools.partial(self._load_all, step)
                offered = CopyOffered(shards, version, replaces=True)
                self._begin_copies(channel, group, offered, f"step {step}", load)
            case wire.ResetRows(_, shards):
                offered = CopyOffered(shards, 0, replaces=True)
                self._begin_copies(channel, group, offered, "first values", _fill_all)
            case _:
                assert_never(request)

    def _begin(self, request: wire.BeginGroup) -> wire.Answer:
        """Begin to hold a group, or other shards of it."""
        name, shards = request.group.name, sorted(set(request.shards))
        known: ServerGroup | None = None
        try:
            _check_begin(request)
            with self._lock:
                known = self._groups.get(name)
                if known is None:
                    if len(self._groups) >= GROUPS_MAX:
                        raise WireError(f"{GROUPS_MAX} groups of tables are the most")
                    self._groups[name] = ServerGroup(request.group, shards, request.layout)
            if known is not None:
                check_same(known.group, request.group)
                known.hold(shards, request.layout)
            return wire.Answer()
        except (UserError, WireError) as error:
            return wire.problem_of(error)
        # Torch raises RuntimeError when memory has run out.
        except (RuntimeError, MemoryError) as error:
            problem = f"the server cannot hold these tables: {error}"
            return wire.Answer(problem=problem, is_full=True, unknown=known is None)

    def _read(
        self, channel: socket.socket, group: ServerGroup | None, request: wire.ReadRows
    ) -> None:
        keys = [wire.receive_array(channel, (n,), torch.int64) for n in request.counts]
        if group is None:
            peer_stream.send_message(channel, wire.Answer(unknown=True))
            return
        self._check_count(group, request.counts)
        found = group.read(request.version, request.shards, keys, request.compared)
        if isinstance(found, ShardStanding):
            peer_stream.send_message(channel, self._describe_standing(group, found))
            return
        sizes = tuple(rows.numel() for rows in found.arrays)
        answer = wire.Answer(sizes=sizes, fingerprints=found.fingerprints)
        peer_stream.send_message(channel, answer)
        every = torch.cat([rows.reshape(-1) for rows in found.arrays])
        wire.send_array(channel, wire.round_to_half(every) if request.as_half else every)

    def _update(
        self, channel: socket.socket, group: ServerGroup | None, request: wire.GiveUpdate
    ) -> None:
        if group is None:
            raise WireError(f"an update of tables {request.group}, which are not known here")
        self._check_count(group, request.counts, request.steps, request.rates)
        keys = [wire.receive_array(channel, (n,), torch.int64) for n in request.counts]
        shapes = zip(request.counts, group.group.tables, strict=True)
        grads = [wire.receive_array(channel, (n, shape.dim)) for n, shape in shapes]
        update = RowUpdate(
            keys=keys,
            grads=grads,
            steps=request.steps,
            rates=request.rates,
            writes=request.writes,
        )
        standing = group.update(request.number, request.shards, update, request.oldest)
        peer_stream.send_message(channel, self._describe_standing(group, standing))

    def _describe_standing(self, group: ServerGroup, standing: ShardStanding) -> wire.Answer:
        """Return the answer with the number of updates of the shards, and with the dropped ones."""
        dropped = group.take_dropped()
        if dropped:
            self._say(f"memory with rows of {group.group.name} has changed: shards {dropped}")
        return wire.Answer(
            behind=standing.behind, past=standing.past, copying=standing.copying, dropped=dropped
        )

    def _scrub(self) -> None:
        """Look at all rows again and again, so that none is damaged in all its copies."""
        for round_number in itertools.count():
            if self._closed.wait(SCRUB_EVERY_S):
                return
            with self._lock:
                groups = list(self._groups.values())
            for group in groups:
                scrub(group, round_number, SCRUB_ROUNDS)

    def _check_count(self, group: ServerGroup, *given: Sequence[object]) -> None:
        count = len(group.group.tables)
        if any(len(each) != count for each in given):
            raise WireError(f"a request for other tables than the {count} of {group.group.name}")

    def _list_keys(
        self, channel: socket.socket, group: ServerGroup | None, request: wire.ListKeys
    ) -> None:
        if group is None:
            peer_stream.send_message(channel, wire.Answer(unknown=True))
            return
        if not 0 <= request.table < len(group.group.tables):
            raise WireError(f"there is no table {request.table}")
        if not 0 <= request.first <= request.stop:
            raise WireError(f"places {request.first} to {request.stop} of a shard")
        found = group.read_keys(
            request.version,
            request.shards,
            request.table,
            range(request.first, request.stop),
            request.compared,
        )
        if isinstance(found, ShardStanding):
            peer_stream.send_message(channel, self._describe_standing(group, found))
            return
        (keys,) = found.arrays
        answer = wire.Answer(sizes=(len(keys),), fingerprints=found.fingerprints)
        peer_stream.send_message(channel, answer)
        wire.send_array(channel, keys)

    def _copy(
        self, channel: socket.socket, group: ServerGroup | None, request: wire.CopyShard
    ) -> None:
        if group is None:
            peer_stream.send_message(channel, wire.Answer(unknown=True))
            return
        copy = group.copy(request.shard, request.version)
        answer = wire.Answer(
            version=copy.version,
            sizes=tuple(array.numel() for array in copy.arrays),
            fingerprints=(copy.fingerprint,),
        )
        peer_stream.send_message(channel, answer)
        # A worker that asks for an earlier version waits for it.
        rate = self._rate if request.version == wire.NEWEST else UNLIMITED
        for array in copy.arrays:
            wire.send_array(channel, array, rate)

    def _begin_copies(
        self,
        channel: socket.socket,
        group: ServerGroup | None,
        offered: CopyOffered,
        origin: str,
        bring: BringShards,
    ) -> None:
        """Begin to copy the shards that the server lacks, and answer at once."""
        if group is not None:
            lacking = group.handle(offered)
            args = group, lacking, origin, bring
            if lacking:
                threading.Thread(target=self._copy_all, args=args, daemon=True).start()
        peer_stream.send_message(channel, wire.Answer(unknown=group is None))

    def _copy_all(
        self, group: ServerGroup, shards: Sequence[int], origin: str, bring: BringShards
    ) -> None:
        left = [*shards]
        try:
            for shard in bring(group, shards):
                left.remove(shard)
            self._say(f"shards {list(shards)} of {group.group.name} were copied from {origin}")
        except (WorldError, OSError, WireError, RuntimeError, MemoryError) as error:
            self._say(f"shards {left} of {group.group.name} cannot be copied: {error}")
        finally:
            group.handle(CopyFailed(tuple(left)))

    def _begin_save(
        self, channel: socket.socket, group: ServerGroup | None, request: wire.SaveShards
    ) -> None:
        """Begin to save shards as they were after a version, and answer whether that is known."""
        store = self._store
        if group is None or store is None:
            peer_stream.send_message(channel, wire.Answer(problem="there is nothing to save here"))
            return
        pin = group.pin(request.version, request.shards, for_save=True)
        if pin is None:
            problem = f"version {request.version} is not known here"
            peer_stream.send_message(channel, wire.Answer(problem=problem))
            return
        args = store, group, request, pin
        threading.Thread(target=self._save, args=args, daemon=True).start()
        peer_stream.send_message(channel, wire.Answer())

    def _save(
        self, store: TableStore, group: ServerGroup, request: wire.SaveShards, pin: Pin
    ) -> None:
        try:
            store.save(group, request, pin)
        except WorldError as error:
            self._say(f"rows of {group.group.name} at step {request.step} are not saved: {error}")
        finally:
            group.unpin(pin)

    def _load_all(self, step: int, group: ServerGroup, shards: Sequence[int]) -> Iterator[int]:
        if self._store is None:
            raise WireError("the job has no --store")
        yield from self._store.load(group, step, shards)

    def _fetch_all(self, source: str, group: ServerGroup, shards: Sequence[int]) -> Iterator[int]:
        with peer_stream.connect(source, self._identity, wire.MAGIC, (0, 0, 0), FETCH_S) as channel:
            for shard in shards:
                fetch_shard(channel, group, shard)
                yield shard


def _fill_all(group: ServerGroup, shards: Sequence[int]) -> Iterator[int]:
    for shard in shards:
        fill_shard(group, shard)
        yield shard


def fetch_shard(
    channel: socket.socket, group: ServerGroup, shard: int, version: int = wire.NEWEST
) -> None:
    """Copy a shard from another server, as of now or of `version`. OSError, WireError."""
    peer_stream.send_message(channel, wire.CopyShard(group.group.name, shard, version))
    answer = peer_stream.receive_message(channel, wire.Answer)
    if answer.unknown:
        raise WireError("the other server does not know these tables")
    arrays = group.tables.make_room(shard)
    sizes = tuple(array.numel() for table in arrays for array in table)
    if answer.sizes != sizes or len(answer.fingerprints) != 1:
        raise WireError(f"shard {shard} has other sizes there")
    for table in arrays:
        for array in table:
            wire.fill_array(channel, array)
    group.adopt(CopyArrived(shard, answer.version), arrays, *answer.fingerprints)


def _check_begin(request: wire.BeginGroup) -> None:
    """Raise WireError for shards, tables or a staleness that no group has."""
    if not all(0 <= shard < SHARDS for shard in request.shards):
        raise WireError(f"shards {request.shards}, where there are {SHARDS}")
    if not 0 <= request.group.staleness <= STALENESS_MAX:
        raise WireError(f"a staleness of {request.group.staleness} updates")
    for shape in request.group.tables:
        wire.check_size((len(request.shards), shape.shard_rows))


def scrub(group: ServerGroup, round_number: int, rounds: int) -> None:
    """Look at the next part of all rows; after `rounds` calls each was looked at once."""
    # The shards may change during the loop.
    shards = group.tables.shards
    if not shards:
        return
    per_shard = max(rounds // len(shards), 1)
    shard = shards[round_number // per_shard % len(shards)]
    rows = max((shape.shard_rows for shape in group.group.tables), default=0)
    part = -(-rows // per_shard)
    first = round_number % per_shard * part
    group.scrub(shard, range(first, first + part))
