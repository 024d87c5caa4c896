"""Keeps, in a node's agent, the files into which its workers have put pieces, and serves them.

A file outlives its worker as long as a piece in it may be of use. Workers of the same job fetch
pieces over TCP: each follows the answer to its request.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import (
    ArenaReading,
    PieceEntry,
    PieceShelf,
    Table,
    kept_pieces,
)


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
