"""Verifies the pieces that a node holds, and makes damaged ones again from those of other nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

import msgspec

from holdfast.engine.core.errors import Damaged, WorldError, first_line
from holdfast.engine.core.redundancy import Piece, Redundancy
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import ALIGN, PieceArena, PieceEntry, PieceShelf, Table
from holdfast.engine.state.memory.node_memory import NodeMemory
from holdfast.engine.state.memory.piece_reader import PieceReader
from holdfast.engine.state.memory.pieces import Image, PieceCoder


class Mending:
    """Looks after one node's memory; `identity`: of this process. Use it in one thread."""

    def __init__(self, memory: NodeMemory, identity: PeerIdentity, redundancy: Redundancy) -> None:
        self._memory = memory
        self._identity = identity
        self._redundancy = redundancy
        self._tried: list[PieceEntry] = []
        self._over = threading.Event()

    def end(self) -> None:
        """Let a round that is under way stop soon. Any thread may call this."""
        self._over.set()

    def round(self, bytes_per_s: float, addresses: Iterable[str]) -> list[str]:
        """Verify all pieces, reading `bytes_per_s` at most, and mend damaged ones.

        `addresses`: those of all nodes' servers. Returns lines for people.
        """
        for number, table in self._memory.tables().items():
            for entry in table.entries:
                for index in range(len(entry.digests)):
                    with contextlib.suppress(Damaged):  # it is noted, or was dropped meanwhile
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
            self._memory.record_end(number)  # nothing more is written there
