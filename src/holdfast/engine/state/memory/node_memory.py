"""Keeps, in a node's agent, the files into which its workers have put pieces, and serves them.

A file outlives its worker as long as a piece in it may be of use. Workers of the same job fetch
pieces over TCP: each follows the answer to its request. They put states and gradients together
again, and mend damaged pieces: data pieces are received where they belong; where some are lost or
damaged, further pieces are fetched in their place, and one more if there is one, which shows
whether they are right.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from holdfast.engine.core.errors import Damaged, WireError, WorldError, first_line
from holdfast.engine.core.redundancy import KeptPieces, Piece, Redundancy
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import (
    ALIGN,
    ArenaReading,
    PieceArena,
    PieceEntry,
    PieceShelf,
    Table,
    kept_pieces,
    problem_of_table,
)
from holdfast.engine.state.memory.pieces import Image, PieceCoder


@dataclass(slots=True)
class _File:
    reading: ArenaReading
    alive: bool = True  # its worker lives
    damaged: list[PieceEntry] = field(default_factory=list)  # entries with a damaged piece

    def read_table(self) -> Table:
        try:
            return self.reading.table() or Table(0)
        except Damaged:
            return Table(0)


class NodeMemory:
    """Keeps the files of one node; its methods may be called by any thread.

    `found_damage` is called when a piece turns out to be damaged. `procs`: processes of each
    worker, on `spread` nodes.
    """

    def __init__(
        self, found_damage: Callable[[], object] = lambda: None, procs: int = 1, spread: int = 1
    ) -> None:
        self._found_damage = found_damage
        self._procs = procs
        self._spread = spread
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._last = 0

    def open(self, worker: int) -> tuple[int, int]:
        """Make a file for a worker's process; returns its number, and a descriptor to hand on.

        OSError if the system has none.
        """
        descriptor = os.memfd_create(f"holdfast-worker-{worker}")
        with self._lock:
            self._last += 1
            self._files[self._last] = _File(ArenaReading(descriptor))
            return self._last, descriptor

    def record_end(self, number: int) -> None:
        """Record that the worker of a file has ended."""
        with self._lock:
            self._files[number].alive = False

    def tables(self) -> dict[int, Table]:
        """Return tables that may be of use, by the number of the file; drop the rest."""
        with self._lock:
            found = {number: file.read_table() for number, file in self._files.items()}
            marks = [table.forgotten for table in found.values()]
            tables = {number: table.drop_older(marks) for number, table in found.items()}
            for number, file in list(self._files.items()):
                whole = [e for e in tables[number].entries if e not in file.damaged]
                tables[number] = tables[number].keep_only(whole)
                if not file.alive and not whole:
                    self._files.pop(number).reading.close()
            return {number: table for number, table in tables.items() if table.entries}

    def find_damaged(self) -> list[tuple[Table, PieceShelf, PieceEntry]]:
        """Return damaged entries that no newer entry replaces, with their tables and shelves."""
        found = []
        tables = self.tables().values()
        held = [(t.worker, entry.key) for t in tables for entry in t.entries]
        with self._lock:
            files = list(self._files.values())
            marks = [file.read_table().forgotten for file in files]
            for file in files:
                table = file.read_table().drop_older(marks)
                file.damaged = [entry for entry in file.damaged if entry in table.entries]
                shelves = [(table.shelf_of(entry), entry) for entry in file.damaged]
                found += [(table, shelf, entry) for shelf, entry in shelves if shelf is not None]
        return [each for each in found if (each[0].worker, each[2].key) not in held]

    def report(self) -> tuple[tuple[KeptPieces, ...], int]:
        """Return the pieces here, for the coordinator, and their bytes."""
        tables = [table for _, table in sorted(self.tables().items())]
        size = sum(e.size * len(e.digests) for table in tables for e in table.entries)
        return tuple(kept_pieces(tables, self._procs, self._spread)), size

    def piece(self, number: int, entry: PieceEntry, index: int) -> memoryview:
        """Return one piece's bytes. Damaged: it has changed, and is dropped."""
        with self._lock:
            file = self._files.get(number)
        if file is None or not 0 <= index < len(entry.digests):
            raise Damaged("there is no such piece any more")
        try:
            return file.reading.piece(entry, index)
        except Damaged:
            with self._lock:
                if entry in file.read_table().entries:  # else it was overwritten since
                    file.damaged.append(entry)
            self._found_damage()
            raise


MAGIC = b"hpiece\0\1"


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a piece in a file of that number; without an entry, for what there is."""

    file: int = 0
    entry: PieceEntry | None = None
    index: int = 0


class PieceAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Lists the pieces, or announces a piece; `sound`: it follows."""

    sound: bool = False
    tables: Mapping[int, Table] = {}


class PieceServer:
    """Serves one node's memory to holders of the job's peer key."""

    def __init__(self, memory: NodeMemory, identity: PeerIdentity) -> None:
        self._memory = memory
        self._identity = identity

    def listen(self, host: str) -> str:
        """Begin to serve; returns where. OSError."""
        address, _ = serve(host, self._identity, MAGIC, self._serve)
        return address

    def _serve(self, channel: socket.socket, _: peer_stream.Purpose) -> None:
        while True:
            self._answer(channel, peer_stream.receive_message(channel, PieceRequest))

    def _answer(self, channel: socket.socket, request: PieceRequest) -> None:
        if request.entry is None:
            peer_stream.send_message(channel, PieceAnswer(sound=True, tables=self._memory.tables()))
            return
        try:
            piece = self._memory.piece(request.file, request.entry, request.index)
        except Damaged:
            peer_stream.send_message(channel, PieceAnswer(sound=False))
            return
        peer_stream.send_message(channel, PieceAnswer(sound=True))
        channel.sendall(piece)


PATIENCE_S = 20.0  # for a node that is silent


@dataclass(frozen=True, slots=True)
class _Held:
    """Names the place of a piece."""

    node: int
    file: int
    entry: PieceEntry
    index: int


class _Node:
    """Connects to one node's server."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.tables: Mapping[int, Table] = {}

    def ask(self) -> None:
        """Ask for its tables. OSError, WireError."""
        peer_stream.send_message(self._channel, PieceRequest())
        tables = peer_stream.receive_message(self._channel, PieceAnswer).tables
        self.tables = {n: table for n, table in tables.items() if not problem_of_table(table)}

    def fetch(self, held: _Held, place: memoryview) -> bool:
        """Receive a piece; return whether it is sound. OSError, WireError."""
        peer_stream.send_message(self._channel, PieceRequest(held.file, held.entry, held.index))
        if not peer_stream.receive_message(self._channel, PieceAnswer).sound:
            return False
        peer_stream.fill(self._channel, place)
        return xxhash.xxh3_128_digest(place) == held.entry.digests[held.index]

    def lose(self) -> None:
        """Give up its pieces: a server that is slow to answer once is not waited for again."""
        self.close()
        self.tables = {}

    def close(self) -> None:
        self._channel.close()


class PieceReader:
    """Reads what nodes hold at present of one shard; `addresses`: of their servers.

    Use it in one thread.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        identity: PeerIdentity,
        redundancy: Redundancy,
        shard: int = 0,
    ) -> None:
        self._shard = shard
        self.received = 0  # bytes of pieces
        self._redundancy = redundancy
        self._nodes: list[_Node] = []
        for address in addresses:
            try:
                channel = peer_stream.connect(address, identity, MAGIC, (0, 0, 0), PATIENCE_S)
                self._nodes.append(_Node(channel))
                self._nodes[-1].ask()
            except (OSError, WireError):
                continue  # its pieces are lost, or will be when they are asked for

    def close(self) -> None:
        """Hang up on all nodes."""
        for node in self._nodes:
            node.close()

    def read(self, kind: str, view: int, step: int) -> memoryview:
        """Read what members of a view have put there for a step. Damaged: too few pieces are left.

        Returns the image's bytes, which may be written to.
        """
        held, parts, entry = self._find(kind, view, step)
        coder = PieceCoder(self._redundancy, parts, entry.whole)
        if coder.size != entry.size:
            raise Damaged(f"pieces of {entry.size} bytes, where {coder.size} were expected")
        room = coder.room().data
        there: dict[Piece, memoryview] = {}
        while wanted := self._choose_next(coder, held, there):
            there |= self._fetch(coder, room, {piece: held.pop(piece) for piece in wanted})
        for part in range(parts):
            found = {p.number: place for p, place in there.items() if p.part == part}
            if len(found) < coder.data:
                raise Damaged(
                    f"of part {part} of the {kind} of step {step}, {len(found)} of the "
                    f"{coder.data} pieces that are needed are left"
                )
            try:
                coder.complete(room, part, found)
            except Damaged:  # they contradict each other: more pieces show which are wrong
                others = {piece: each for piece, each in held.items() if piece.part == part}
                if not others:
                    raise
                more = self._fetch(coder, room, others)
                found |= {piece.number: place for piece, place in more.items()}
                coder.complete(room, part, found)
        return room[: entry.whole]

    def _find(self, kind: str, view: int, step: int) -> tuple[dict[Piece, _Held], int, PieceEntry]:
        """Find the holders of pieces. Damaged if there are none."""
        found: list[tuple[Piece, int, _Held]] = []
        for number, node in enumerate(self._nodes):
            for file, table in node.tables.items():
                for entry in table.entries:
                    if entry.key != (kind, view, step, self._shard):
                        continue
                    shelf = table.shelf_of(entry)
                    if shelf is None:
                        continue
                    pieces = [Piece(*each) for each in shelf.pieces]
                    for index, piece in enumerate(pieces[: len(entry.digests)]):
                        found.append((piece, shelf.parts, _Held(number, file, entry, index)))
        if not found:
            raise Damaged(f"no node that is reached holds the {kind} of step {step}")
        shapes = Counter((n, held.entry.whole, held.entry.size) for _, n, held in found)
        shape, _ = shapes.most_common(1)[0]
        fits = [
            each for each in found if (each[1], each[2].entry.whole, each[2].entry.size) == shape
        ]
        return {piece: held for piece, _, held in fits}, shape[0], fits[0][2].entry

    def _choose_next(
        self, coder: PieceCoder, held: Mapping[Piece, _Held], there: Mapping[Piece, memoryview]
    ) -> list[Piece]:
        """Choose what to fetch next: as much of each part as is missing, data first."""
        found: list[Piece] = []
        for part in range(coder.parts):
            here = [piece for piece in there if piece.part == part]
            left = sorted(piece for piece in held if piece.part == part)
            chosen = left[: max(coder.data - len(here), 0)]
            coded = [p for p in (*here, *chosen) if p.number >= coder.data]
            if coded and coder.data > 1 and len(here) <= coder.data:
                chosen = left[: coder.data + 1 - len(here)]  # with one more to check them
            found += chosen
        return found

    def _fetch(
        self, coder: PieceCoder, room: memoryview, wanted: Mapping[Piece, _Held]
    ) -> dict[Piece, memoryview]:
        """Fetch pieces from all nodes at once; returns the sound ones."""
        found: dict[Piece, memoryview] = {}

        def fetch(number: int) -> None:
            for piece, held in wanted.items():
                if held.node != number:
                    continue
                place = coder.place(room, piece)
                place = np.empty(coder.size, np.uint8).data if place is None else place
                try:
                    sound = self._nodes[number].fetch(held, place)
                    self.received += len(place)
                    if sound:
                        found[piece] = place
                except (OSError, WorldError):
                    self._nodes[number].lose()
                    return  # what else it holds is lost

        numbers = sorted({held.node for held in wanted.values()})
        threads = [threading.Thread(target=fetch, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Mending:
    """Looks after one node's memory; `identity`: of this process. Use it in one thread."""

    def __init__(self, memory: NodeMemory, identity: PeerIdentity, redundancy: Redundancy) -> None:
        self._memory = memory
        self._identity = identity
        self._redundancy = redundancy
        self._tried: list[PieceEntry] = []
        self._over = threading.Event()

    def end(self) -> None:
        """Stop a round that is under way, soon. Any thread may call this."""
        self._over.set()

    def round(self, bytes_per_s: float, addresses: Iterable[str]) -> list[str]:
        """Verify all pieces, reading `bytes_per_s` at most, and mend damaged ones.

        `addresses`: those of all nodes' servers. Returns lines for people.
        """
        for number, table in self._memory.tables().items():
            for entry in table.entries:
                for index in range(len(entry.digests)):
                    with contextlib.suppress(Damaged):  # it is recorded, or was dropped
                        self._memory.piece(number, entry, index)
                    if self._over.wait(entry.size / bytes_per_s):
                        return []
        damaged = self._memory.find_damaged()
        self._tried = [entry for entry in self._tried if entry in [e for _, _, e in damaged]]
        found = [each for each in damaged if each[2] not in self._tried]
        return [self._mend(table, shelf, entry, addresses) for table, shelf, entry in found]

    def _mend(
        self, table: Table, shelf: PieceShelf, entry: PieceEntry, addresses: Iterable[str]
    ) -> str:
        what = f"pieces of the {entry.kind} of step {entry.step} were damaged in memory"
        self._tried.append(entry)
        reader = PieceReader(addresses, self._identity, self._redundancy, entry.shard)
        try:
            image = Image([reader.read(entry.kind, entry.view, entry.step)])
            self._write(table, shelf, entry, image)
        except (WorldError, OSError, MemoryError) as error:
            return f"{what}, and cannot be made again: {first_line(error)}"
        finally:
            reader.close()
        return f"{what}, and were made again from those of other nodes"

    def _write(self, table: Table, shelf: PieceShelf, entry: PieceEntry, image: Image) -> None:
        """Write all pieces of an entry into a file of their own. OSError, MemoryError."""
        coder = PieceCoder(self._redundancy, shelf.parts, entry.whole)
        number, descriptor = self._memory.open(table.worker)
        size = entry.size * len(shelf.pieces)
        try:
            arena = PieceArena(descriptor, table.worker, size + ALIGN)
            start, room = arena.take(size)
            digests = []
            for index, piece in enumerate(shelf.pieces):
                target = room[index * entry.size : (index + 1) * entry.size]
                digests.append(coder.make(image, Piece(*piece), target))
            new = msgspec.structs.replace(entry, start=start, digests=tuple(digests))
            arena.put(new, shelf)
        finally:
            self._memory.record_end(number)  # the file is complete
