"""Reads a checkpoint straight into its destination, several ranges at once, verifying every byte.

No bytes are used before their digest has been found right; wrong ones are named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.state.store.manifest import Chunk, Entry, Manifest, chunks_of, digest, expand
from holdfast.engine.state.store.storage import Missing, Storage

READ_BYTES = 8 << 20  # at a time, where chunks lie one after the other
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """Describes bytes that differ from the saved ones.

    `passing`: they are not known to be wrong; a storage just does not provide them now.
    """

    entry: str
    start: int
    size: int
    pack: str
    offset: int
    why: str
    passing: bool = False

    def __str__(self) -> str:
        return (
            f"bytes {self.start} to {self.start + self.size} of {self.entry}, at byte "
            f"{self.offset} of {self.pack}: {self.why}"
        )


class Rotten(Damaged):
    """Names the first bytes of a checkpoint that were found wrong."""

    def __init__(self, bad: Bad) -> None:
        super().__init__(str(bad))
        self.bad = bad


class OneEntry:
    """Reads one entry of plain bytes, by its name, into `data`.

    When called with a manifest it raises Damaged if that has no such entry, or one too large.
    """

    def __init__(self, name: str, bytes_max: int) -> None:
        self.data = bytearray()
        self._name = name
        self._bytes_max = bytes_max

    def __call__(self, manifest: Manifest) -> list[tuple[Entry, memoryview]]:
        found = [e for e in manifest.entries if e.name == self._name]
        if not found or found[0].size > self._bytes_max:
            raise Damaged(f"the checkpoint of step {manifest.step} has no {self._name}")
        self.data = bytearray(found[0].size)
        return [(found[0], memoryview(self.data))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Represents chunks of one entry that are read at once."""

    entry: str
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    @property
    def stored(self) -> int:
        return sum(chunk.stored for chunk in self.chunks)


def load(storage: Storage, manifest: Manifest, targets: Sequence[tuple[Entry, memoryview]]) -> None:
    """Fill each memory with its entry's bytes. Rotten names the first bytes that are wrong.

    WorldError if the storage does not provide some of them now. The memories' contents are
    undefined after an exception.
    """
    work = []
    for entry, into in targets:
        memory = into.cast("B")
        if len(memory) != entry.size:
            raise ValueError(f"{entry.name} has {entry.size} bytes, its memory {len(memory)}")
        for piece in _pieces(manifest, entry):
            start = piece.chunks[0].start
            work.append((piece, memory[start : start + piece.size]))
    found: list[Bad] = []

    def do(each: tuple[_Piece, memoryview]) -> list[Bad]:
        return _read(storage, *each) if not found else []

    with ThreadPoolExecutor(THREADS, "holdfast-load") as pool:
        for bad in pool.map(do, work):
            found += bad
    _complain(found)


def load_range(
    storage: Storage, manifest: Manifest, entry: Entry, start: int, into: memoryview
) -> None:
    """Fill `into` with an entry's bytes from `start` on; whole chunks are read.

    Raises Rotten or WorldError as `load` does, and then `into` is undefined.
    """
    memory = into.cast("B")
    end = start + len(memory)
    if not 0 <= start <= end <= entry.size:
        raise ValueError(f"{entry.name} has {entry.size} bytes, asked were {start} to {end}")
    for chunk in chunks_of(manifest, entry):
        if chunk.start >= end or chunk.start + chunk.size <= start or not memory:
            continue
        data = memoryview(bytearray(chunk.size))
        _complain(_read(storage, _Piece(entry=entry.label, chunks=(chunk,)), data))
        first, last = max(start, chunk.start), min(end, chunk.start + chunk.size)
        memory[first - start : last - start] = data[first - chunk.start : last - chunk.start]


def verify(
    storage: Storage, manifest: Manifest, progress: Callable[[int], None] | None = None
) -> list[Bad]:
    """Read a whole checkpoint and return its faults, chunk by chunk.

    `progress` is called with the number of bytes read since its last call; it may block, to slow
    the reading down.
    """
    spare = _Spare()
    pieces = [p for e in manifest.entries for p in _pieces(manifest, e)]
    found: list[Bad] = []
    if progress is not None:
        for piece in pieces:
            found += _read(storage, piece, spare.of(piece.size))
            progress(piece.size)
        return found
    with ThreadPoolExecutor(THREADS, "holdfast-verify") as pool:
        for bad in pool.map(lambda p: _read(storage, p, spare.of(p.size)), pieces):
            found += bad
    return found


class _Spare:
    """Keeps one reused memory for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def of(self, size: int) -> memoryview:
        memory: bytearray | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._local.memory = bytearray(max(size, READ_BYTES))
        return memoryview(memory)[:size]


def _pieces(manifest: Manifest, entry: Entry) -> Iterator[_Piece]:
    group: list[Chunk] = []
    size = 0
    for chunk in chunks_of(manifest, entry):
        last = group[-1] if group else None
        follows = last is not None and (last.pack, last.offset + last.stored) == (
            chunk.pack,
            chunk.offset,
        )
        if group and (not follows or size + chunk.size > READ_BYTES):
            yield _Piece(entry=entry.label, chunks=tuple(group))
            group, size = [], 0
        group.append(chunk)
        size += chunk.size
    if group:
        yield _Piece(entry=entry.label, chunks=tuple(group))


def _read(storage: Storage, piece: _Piece, into: memoryview) -> list[Bad]:
    first = piece.chunks[0]
    # Bytes that are stored uncompressed go straight into their place.
    data = into if piece.stored == piece.size else memoryview(bytearray(piece.stored))
    try:
        storage.read(first.pack, first.offset, data)
    except WorldError as error:
        if len(piece.chunks) == 1:
            passing = not isinstance(error, Damaged | Missing)
            return [_make_bad(piece.entry, first, str(error), passing)]
        found = []  # perhaps some of them can be read
        for chunk in piece.chunks:
            at = chunk.start - first.start
            alone = _Piece(entry=piece.entry, chunks=(chunk,))
            found += _read(storage, alone, into[at : at + chunk.size])
        return found
    found = []
    for chunk in piece.chunks:
        at = chunk.start - first.start
        why = _place(chunk, data[chunk.offset - first.offset :], into[at : at + chunk.size])
        if why:
            found.append(_make_bad(piece.entry, chunk, why))
    return found


def _place(chunk: Chunk, data: memoryview, into: memoryview) -> str:
    """Copy a chunk to its destination unless it is there; return its fault, or ""."""
    if chunk.stored < chunk.size:
        problem = expand(data[: chunk.stored], into)
        if problem:
            return problem
    elif data.obj is not into.obj:
        into[:] = data[: chunk.size]
    return "" if digest(into) == chunk.digest else "its digest is another"


def _complain(found: Sequence[Bad]) -> None:
    for bad in found:
        if not bad.passing:
            raise Rotten(bad)
    if found:
        raise WorldError(str(found[0]))


def _make_bad(entry: str, chunk: Chunk, why: str, passing: bool = False) -> Bad:
    return Bad(
        entry=entry,
        start=chunk.start,
        size=chunk.size,
        pack=chunk.pack,
        offset=chunk.offset,
        why=why,
        passing=passing,
    )
