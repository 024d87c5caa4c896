"""Keeps pieces in a file in memory, which outlives the process that has filled it.

A node's agent makes the file and hands its descriptor to a worker. Only the worker writes: pieces
first, then a table that names them, in turn to one of two places. So whenever it is killed, the
newer of the two tables that are whole describes pieces that are. Its bytes are never executed.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import threading
from collections.abc import Collection, Sequence

import msgspec
import xxhash

from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.redundancy import PIECES_MAX, KeptPieces, Piece

STATE, GRADIENT = "state", "gradient"
TABLE_BYTES = 1 << 20  # each of both tables has room for this; most is never touched
PUT_BYTES = TABLE_BYTES // 2  # no more is put into a fuller table, so that marks always fit
FIRST = 2 * TABLE_BYTES  # where pieces begin
ALIGN = 64
HEAD = struct.Struct("=8sQI16s")  # magic, number of the table, length and digest of what follows
MAGIC = b"hpieces\1"
LOOKS = 5  # at tables that are being written
COUNT_MAX = 1 << 53  # limits views, steps and bytes
PARTS_MAX = 100_000  # as many as a job may have nodes
DIGEST_BYTES = 16


class PieceEntry(msgspec.Struct, frozen=True, array_like=True):
    """Describes a worker's pieces of one state or gradient; they lie one after the other.

    `step`: the steps before the state, or the step of the gradient. `whole`: bytes of the whole
    state or gradient. `size`: bytes of each piece. `start`: the first one's place in the file.
    `digests`: those of the pieces. `shard`: the number of the model's shard.
    """

    kind: str
    view: int
    step: int
    whole: int
    size: int
    start: int
    digests: tuple[bytes, ...]
    shard: int = 0

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.kind, self.view, self.step, self.shard


class PieceShelf(msgspec.Struct, frozen=True, array_like=True):
    """Lists the pieces of a shard that the worker keeps here as a member of a view.

    `committed`: the worker has committed the steps before this one.
    """

    view: int
    parts: int
    pieces: tuple[tuple[int, int], ...]
    committed: int
    shard: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.view, self.shard


class Table(msgspec.Struct, frozen=True, array_like=True):
    """Describes the contents of a worker's file.

    `forgotten`: a view and a step: that view has protected the state after this many steps.
    """

    worker: int
    shelves: tuple[PieceShelf, ...] = ()
    entries: tuple[PieceEntry, ...] = ()
    forgotten: tuple[int, int] = (0, 0)

    def shelf_of(self, entry: PieceEntry) -> PieceShelf | None:
        """Return the shelf of an entry, which names its pieces."""
        key = (entry.view, entry.shard)
        return next((shelf for shelf in self.shelves if shelf.key == key), None)

    def drop_older(self, marks: Sequence[tuple[int, int]]) -> Table:
        """Return this without entries that are older than the protected states in `marks`."""
        return self.keep_only(
            [e for e in self.entries if not any(_is_older(e, *mark) for mark in marks)]
        )

    def keep_only(self, entries: Sequence[PieceEntry]) -> Table:
        """Return this without all other entries, and without the shelves of their views."""
        kept = {(entry.view, entry.shard) for entry in entries}
        shelves = tuple(shelf for shelf in self.shelves if shelf.key in kept)
        return msgspec.structs.replace(self, entries=tuple(entries), shelves=shelves)


_decode_table = msgspec.msgpack.Decoder(Table).decode


def kept_pieces(tables: Sequence[Table], procs: int = 1, spread: int = 1) -> list[KeptPieces]:
    """List the contents of a node's tables for the coordinator.

    `procs`: processes of each worker. All of them must hold it, unless they are on several nodes
    (`spread`): then the pieces of each shard are listed. A process may have several tables, since
    damaged pieces are made again elsewhere.
    """
    found: list[KeptPieces] = []
    for view, worker in sorted({(shelf.view, t.worker) for t in tables for shelf in t.shelves}):
        its = [table for table in tables if table.worker == worker]
        shelves = [shelf for table in its for shelf in table.shelves if shelf.view == view]
        committed = max(shelf.committed for shelf in shelves)
        held = [
            {(e.kind, e.step) for t in its for e in t.entries if (e.view, e.shard) == (view, shard)}
            for shard in range(procs)
        ]
        if spread == 1:
            all_hold = set.intersection(*held)
            found.append(_describe_shelf(worker, shelves[0], all_hold, committed))
            continue
        of_shards: dict[KeptPieces, list[int]] = {}
        for shelf in {each.shard: each for each in shelves}.values():
            told = _describe_shelf(worker, shelf, held[shelf.shard], committed)
            of_shards.setdefault(told, []).append(shelf.shard)
        found += [dataclasses.replace(k, shards=tuple(each)) for k, each in of_shards.items()]
    return found


def _describe_shelf(
    worker: int, shelf: PieceShelf, held: Collection[tuple[str, int]], committed: int
) -> KeptPieces:
    gradients = {step for kind, step in held if kind == GRADIENT}
    first = end = max(gradients, default=-1) + 1
    while first - 1 in gradients:
        first -= 1
    return KeptPieces(
        view=shelf.view,
        worker=worker,
        parts=shelf.parts,
        pieces=tuple(Piece(*each) for each in shelf.pieces),
        states=tuple(sorted(step for kind, step in held if kind == STATE)),
        first=first,
        end=end,
        committed=committed,
    )


def _is_older(entry: PieceEntry, view: int, step: int) -> bool:
    """Return whether an entry is of no use once a view has protected the state after `step` steps.

    Entries of a later view are still of use: that view may have begun further back.
    """
    if entry.view > view:
        return False
    same = entry.view == view and entry.kind == STATE
    return entry.step < step or (entry.kind == STATE and entry.step == step and not same)


def problem_of_table(table: Table, file_bytes: int = COUNT_MAX) -> str:
    """Return the reason why a file of `file_bytes` cannot have this table; empty if it may.

    A script could overwrite the memory in which its worker's table lies, and other nodes send
    theirs; a digest only shows that the bytes did not change after they were written.
    """
    if not _are_counts(table.worker, *table.forgotten):
        return f"worker {table.worker} has forgotten {table.forgotten}"
    for shelf in table.shelves:
        if problem := _problem_of_shelf(shelf):
            return problem
    for entry in table.entries:
        if problem := _problem_of_entry(entry, file_bytes):
            return problem
    return ""


def _problem_of_shelf(shelf: PieceShelf) -> str:
    if not _are_counts(shelf.view, shelf.committed, shelf.shard):
        return f"a shelf of view {shelf.view}, shard {shelf.shard}, committed {shelf.committed}"
    if not 1 <= shelf.parts <= PARTS_MAX:
        return f"a shelf of {shelf.parts} parts"
    for part, number in shelf.pieces:
        if not (0 <= part < shelf.parts and 0 <= number < PIECES_MAX):
            return f"a shelf of {shelf.parts} parts with piece {number} of part {part}"
    return ""


def _problem_of_entry(entry: PieceEntry, file_bytes: int) -> str:
    if entry.kind not in (STATE, GRADIENT):
        return f"an entry of kind {entry.kind[:20]!r}"
    if not _are_counts(entry.view, entry.step, entry.shard, entry.whole, entry.start):
        return f"an entry of view {entry.view}, step {entry.step}, at byte {entry.start}"
    end = entry.start + entry.size * len(entry.digests)
    if entry.size < 1 or end > file_bytes:
        return f"an entry with pieces of {entry.size} bytes, up to byte {end} of {file_bytes}"
    if any(len(digest) != DIGEST_BYTES for digest in entry.digests):
        return "an entry with a digest of another length"
    return ""


def _are_counts(*numbers: int) -> bool:
    return all(0 <= number <= COUNT_MAX for number in numbers)


class PieceArena:
    """Writes the file of one process of a worker, of at most `budget` bytes.

    Its methods may be called by several threads.
    """

    def __init__(self, descriptor: int, worker: int, budget: int) -> None:
        os.ftruncate(descriptor, FIRST + budget)  # takes no memory until it is written to
        self.budget = budget
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, FIRST + budget)
        self._memory = memoryview(self._map)
        self._lock = threading.Lock()
        self._table = Table(worker)
        self._number = 0
        self._touched = FIRST  # memory is there up to here
        self._taken: dict[int, int] = {}  # where it ends, by where it starts

    @property
    def used(self) -> int:
        """Return the number of bytes taken."""
        with self._lock:
            return sum(end - start for start, end in self._taken.items())

    def take(self, size: int) -> tuple[int, memoryview]:
        """Find room for `size` bytes; returns its start and bytes. MemoryError if there is none."""
        size = max(-(-size // ALIGN) * ALIGN, ALIGN)
        with self._lock:
            at = FIRST
            for start, end in sorted(self._taken.items()):
                if start - at >= size:
                    break
                at = end
            if at + size > len(self._memory):
                raise MemoryError(f"{size} bytes more do not fit into the memory for pieces")
            if at + size > self._touched:  # a write to memory that is not there is a SIGBUS
                try:
                    os.posix_fallocate(self._descriptor, self._touched, at + size - self._touched)
                except OSError as error:
                    raise MemoryError(f"no memory for pieces: {error.strerror}") from None
                self._touched = at + size
            self._taken[at] = at + size
            return at, self._memory[at : at + size]

    def give_back(self, start: int) -> None:
        """Free room that was taken and not put into the table."""
        with self._lock:
            del self._taken[start]

    def put(self, entry: PieceEntry, shelf: PieceShelf) -> None:
        """Name pieces that lie in room that was taken, in place of such with the same key.

        MemoryError: the table has no room for more.
        """
        with self._lock:
            table = self._table
            old = [each for each in table.entries if each.key == entry.key]
            entries = [each for each in table.entries if each.key != entry.key]
            shelves = table.shelves
            if all(each.key != shelf.key for each in shelves):
                shelves = (*shelves, shelf)
            self._write(
                msgspec.structs.replace(table, shelves=shelves, entries=(*entries, entry)),
                old,
                PUT_BYTES,
            )

    def mark(self, view: int, step: int) -> None:
        """Record that the worker commits a step, as a member of a view."""
        with self._lock:
            table = self._table
            shelves = tuple(
                msgspec.structs.replace(shelf, committed=max(shelf.committed, step + 1))
                if shelf.view == view
                else shelf
                for shelf in table.shelves
            )
            if shelves != table.shelves:
                self._write(msgspec.structs.replace(table, shelves=shelves), [])

    def forget(self, view: int, step: int) -> None:
        """Drop entries older than the state after `step` steps, which a view has protected."""
        with self._lock:
            table = msgspec.structs.replace(self._table, forgotten=(view, step))
            new = table.drop_older([(view, step)])
            kept = {entry.key for entry in new.entries}
            self._write(new, [each for each in table.entries if each.key not in kept])

    def _write(self, table: Table, dropped: Sequence[PieceEntry], most: int = TABLE_BYTES) -> None:
        body = msgspec.msgpack.encode(table)
        if HEAD.size + len(body) > most:
            raise MemoryError(f"{len(table.entries)} entries do not fit into the table of pieces")
        self._table, self._number = table, self._number + 1
        at = self._number % 2 * TABLE_BYTES
        head = HEAD.pack(MAGIC, self._number, len(body), xxhash.xxh3_128_digest(body))
        self._memory[at : at + HEAD.size] = head
        self._memory[at + HEAD.size : at + HEAD.size + len(body)] = body
        for entry in dropped:  # only once the table is written
            del self._taken[entry.start]


class ArenaReading:
    """Reads a worker's file: while it works, and after its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = memoryview(b"")

    def table(self) -> Table | None:
        """Return the newest table; None if there is none. Damaged if none is whole."""
        if not self._map():
            return None
        for _ in range(LOOKS):
            heads = [HEAD.unpack(self._memory[at : at + HEAD.size]) for at in (0, TABLE_BYTES)]
            found = [head for head in heads if head[0] == MAGIC]
            for _, number, length, digest in sorted(found, key=lambda head: -head[1]):
                at = number % 2 * TABLE_BYTES + HEAD.size
                body = bytes(self._memory[at : at + min(length, TABLE_BYTES)])
                if xxhash.xxh3_128_digest(body) != digest:
                    continue
                try:
                    table = _decode_table(body)
                except msgspec.MsgspecError:
                    continue
                if not problem_of_table(table, len(self._memory)):
                    return table
            if not found:
                return None
        raise Damaged("both tables of a worker's pieces are damaged")

    def piece(self, entry: PieceEntry, index: int) -> memoryview:
        """Return the bytes of one of an entry's pieces. Damaged if they have changed."""
        start = entry.start + index * entry.size
        piece = self._memory[start : start + entry.size]
        if len(piece) != entry.size or xxhash.xxh3_128_digest(piece) != entry.digests[index]:
            raise Damaged(f"a piece of the {entry.kind} of step {entry.step} is damaged in memory")
        return piece

    def close(self) -> None:
        """Close the file; its memory is free once no reader has it open."""
        os.close(self._descriptor)
        self._memory = memoryview(b"")

    def _map(self) -> bool:
        """Map the file, once the worker has given it its size; return whether it has."""
        if not self._memory:
            size = os.fstat(self._descriptor).st_size
            if size < FIRST:
                return False
            self._memory = memoryview(mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ))
        return True
