"""Keeps digests of training data, and reads files whose blocks are verified against them.

An index has the digests of the blocks of files, or of the samples of a dataset. It describes data
while it is sound, so that later reads from a disk or a network can be compared with it. The file: a
magic word, the head's length, the head (MessagePack), the digests, and a digest of all these. It is
written under another name first, and no part of it is trusted before its own digest is right.

`VerifiedFiles` reads byte ranges, for datasets over memory-mapped tokens, records or archives.
Reading a record touches its blocks only, and verifies each once. A block that differs is read
again, then taken from a mirror: another directory with the same tree. Several processes may use
it, and each verifies the blocks that it reads for itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import xxhash

from holdfast.engine.core.errors import Damaged, UserError, WorldError, first_line, newer_format
from holdfast.engine.state.store.regular_files import open_regular, read_regular, regular_stream

MAGIC = b"HOLDIDX1"
DIGEST_BYTES = 16  # xxh3-128
BLOCK_BYTES = 512 << 10
BLOCK_BYTES_MIN, BLOCK_BYTES_MAX = 4 << 10, 64 << 20
INDEX_BYTES_MAX = 1 << 34
_LENGTH = struct.Struct("<I")
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Block = Annotated[int, msgspec.Meta(ge=BLOCK_BYTES_MIN, le=BLOCK_BYTES_MAX)]
Seen = Callable[[int], None]  # called with the number of bytes just read
READS = 2  # reads of a block from each directory, until it is given up there


class _SamplesHead(msgspec.Struct, tag="samples", tag_field="of", forbid_unknown_fields=True):
    version: Literal[1]
    length: _Natural


class _FilesHead(msgspec.Struct, tag="files", tag_field="of", forbid_unknown_fields=True):
    version: Literal[1]
    block_bytes: _Block
    files: list[tuple[str, _Natural]]


_decode = msgspec.msgpack.Decoder(_SamplesHead | _FilesHead).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleIndex:
    """Keeps the digest of each sample of a dataset, one after the other."""

    digests: bytes

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def digest(self, number: int) -> bytes:
        """Return the digest of one sample."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Describes one file: its size in bytes, and a digest of each of its blocks."""

    #: Path below the directory, with slashes; empty if the index is of this file alone.
    name: str
    size: int
    digests: bytes

    def digest(self, block: int) -> bytes:
        """Return the digest of one block."""
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """Keeps the digests of a tree of files, block by block, in the order of their names."""

    block_bytes: int
    files: tuple[FileEntry, ...]


Index = SampleIndex | FileIndex
I = TypeVar("I", SampleIndex, FileIndex)  # noqa: E741 - a kind of index


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Names a file that differs from the index: in one of its blocks, or as a whole."""

    name: str
    block: int | None
    problem: str


def block_digest(data: bytes | memoryview) -> bytes:
    """Return the digest of bytes."""
    return xxhash.xxh3_128_digest(data)


def blocks_of(size: int, block_bytes: int) -> int:
    """Return the number of blocks in a file of `size` bytes."""
    return -(-size // block_bytes)


# ---------------------------------------------------------------- the file


def encode_index(index: Index) -> bytes:
    """Return the bytes of an index file."""
    head: _SamplesHead | _FilesHead
    if isinstance(index, SampleIndex):
        head, digests = _SamplesHead(version=1, length=len(index)), index.digests
    else:
        names = [(file.name, file.size) for file in index.files]
        head = _FilesHead(version=1, block_bytes=index.block_bytes, files=names)
        digests = b"".join(file.digests for file in index.files)
    packed = msgspec.msgpack.encode(head)
    body = MAGIC + _LENGTH.pack(len(packed)) + packed + digests
    return body + block_digest(body)


def decode_index(data: bytes, where: str) -> Index:
    """Read the bytes of an index file. UserError if they are none, or not as they were written."""
    start = len(MAGIC) + _LENGTH.size
    newer = newer_format(data, MAGIC)
    if not (newer or data.startswith(MAGIC)) or len(data) < start + DIGEST_BYTES:
        raise UserError(f"{where} is not an index: write one with `holdfast data index`")
    body = memoryview(data)[:-DIGEST_BYTES]
    if block_digest(body) != data[-DIGEST_BYTES:]:
        raise UserError(
            f"{where} is damaged or cut off, as its own digest shows: take a copy of it, or write "
            "it again with `holdfast data index` from data that are known to be sound"
        )
    if newer:
        raise UserError(f"{where} {newer}")
    stop = start + _LENGTH.unpack_from(data, len(MAGIC))[0]
    try:
        return _assemble(_decode(body[start:stop]), bytes(body[stop:]))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{where} is an index that this version cannot read: {error}") from None


def _assemble(head: _SamplesHead | _FilesHead, digests: bytes) -> Index:
    """Put an index together; ValueError if the head does not fit the digests."""
    if isinstance(head, _SamplesHead):
        _check_count(head.length, digests)
        return SampleIndex(digests=digests)
    counts = [blocks_of(size, head.block_bytes) for _, size in head.files]
    _check_count(sum(counts), digests)
    names = [name for name, _ in head.files]
    if names != sorted(set(names)) or any(not _is_inside(name) for name in names if name):
        raise ValueError("its file names are not in order, or lead out of the directory")
    files, at = [], 0
    for (name, size), count in zip(head.files, counts, strict=True):
        stop = at + count * DIGEST_BYTES
        files.append(FileEntry(name=name, size=size, digests=digests[at:stop]))
        at = stop
    return FileIndex(block_bytes=head.block_bytes, files=tuple(files))


def _check_count(count: int, digests: bytes) -> None:
    if len(digests) != count * DIGEST_BYTES:
        raise ValueError(f"it names {count} digests and holds {len(digests)} bytes of them")


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def write_index(index: Index, path: Path) -> None:
    """Write an index file: whole, or not at all. WorldError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(encode_index(index))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise WorldError(f"cannot write {path}: {error.strerror or error}") from None


def read_index(path: str | os.PathLike[str], kind: type[I]) -> I:
    """Read an index of this kind. UserError if there is none."""
    index = open_index(path)
    if not isinstance(index, kind):
        found = "files" if isinstance(index, FileIndex) else "a dataset's samples"
        wanted = "files" if kind is FileIndex else "a dataset's samples"
        raise UserError(f"{path} is an index of {found}: give one of {wanted}")
    return index


def open_index(path: str | os.PathLike[str]) -> Index:
    """Read an index of either kind. UserError if there is none."""
    where = Path(path)
    try:
        return decode_index(read_regular(where, INDEX_BYTES_MAX), str(where))
    except OSError as error:
        raise UserError(
            f"the index {where} cannot be read ({error.strerror or error}): check the path, or "
            "write it with `holdfast data index`"
        ) from None


# ---------------------------------------------------------------- trees of files


def files_below(root: Path) -> list[str]:
    """List the files of a tree in order, or the empty name for a single file. UserError."""
    if root.is_file():
        return [""]
    if not root.is_dir():
        raise UserError(f"there is no {root}: check the path")
    found = [
        Path(folder, file).relative_to(root).as_posix()
        for folder, _, files in os.walk(root)
        for file in files
        if not file.startswith(".")
    ]
    return sorted(found)


def index_files(root: Path, block_bytes: int, seen: Seen, leave_out: Path) -> FileIndex:
    """Compute the digests of a tree of files, without the index itself. UserError, WorldError."""
    if not BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX:
        raise UserError(
            f"blocks of {block_bytes} bytes: give {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX} bytes"
        )
    files = []
    for name in files_below(root):
        if (root / name).absolute() == leave_out.absolute():
            continue
        digests, size = [], 0
        for block in _blocks(root / name, block_bytes):
            digests.append(block_digest(block))
            size += len(block)
            seen(len(block))
        files.append(FileEntry(name=name, size=size, digests=b"".join(digests)))
    return FileIndex(block_bytes=block_bytes, files=tuple(files))


def verify_files(root: Path, index: FileIndex, seen: Seen) -> Iterator[Difference]:
    """Compare a tree of files with its index. UserError if there is no such tree."""
    if [file.name for file in index.files] == [""] and not root.is_file():
        raise UserError(f"{root} is not a file: the index is of a single one")
    present = set(files_below(root))
    for file in index.files:
        if file.name not in present:
            yield Difference(name=file.name, block=None, problem="is missing")
            continue
        size, number = 0, 0
        try:
            for number, block in enumerate(_blocks(root / file.name, index.block_bytes)):
                if size > file.size:  # the rest may be endless
                    size = max((root / file.name).stat().st_size, size + len(block))
                    break
                if block_digest(block) != file.digest(number):
                    yield Difference(name=file.name, block=number, problem="differs")
                size += len(block)
                seen(len(block))
        except WorldError as error:
            yield Difference(name=file.name, block=None, problem=str(error))
            continue
        if size != file.size:
            problem = f"has {size} bytes instead of {file.size}"
            yield Difference(name=file.name, block=None, problem=problem)


def _blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    try:
        with regular_stream(path, buffering=0) as file:
            while block := _read_fully(file.read, block_bytes):
                yield block
    except OSError as error:
        raise WorldError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_fully(read: Callable[[int], bytes | None], size: int) -> bytes:
    """Read `size` bytes, fewer only at the end."""
    data = read(size) or b""
    while 0 < len(data) < size and (more := read(size - len(data))):
        data += more
    return data


class VerifiedFiles:
    """Offers the bytes of a tree of files, or of a single file, whose name is empty.

    `root`: the tree or the file. `index`: what `holdfast data index` has written for it. `mirrors`:
    copies, which are read where `root` has other bytes. Errors come with the first read.

        files = holdfast.VerifiedFiles("tokens.bin", "tokens.bin.hfindex")
        tokens = numpy.frombuffer(files.read(offset=0, size=64), dtype="uint16")
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        index: str | os.PathLike[str],
        mirrors: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self._roots = [Path(root), *map(Path, mirrors)]
        self._index_path = Path(index)
        self._index: FileIndex | None = None
        self._files: dict[str, FileEntry] = {}
        self._good: dict[tuple[str, int], int] = {}  # the directory with a sound block
        self._handles: dict[tuple[str, int], int] = {}
        self.healed: list[str] = []  # blocks that were read again, or from a mirror

    def __getstate__(self) -> dict[str, Any]:
        """Leave out open files: another process opens its own, and verifies for itself."""
        return {"roots": self._roots, "index": self._index_path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        first, *mirrors = state["roots"]
        self.__init__(first, state["index"], mirrors)  # type: ignore[misc]

    def names(self) -> list[str]:
        """Return the names of all files, in order. UserError if the index cannot be read."""
        self._open()
        return list(self._files)

    def size(self, name: str = "") -> int:
        """Return the size in bytes of the file `name`, as the index says.

        UserError for a file that it does not know.
        """
        return self._entry(name).size

    def read(self, offset: int, size: int, name: str = "") -> bytes:
        """Read `size` bytes of the file `name` from byte `offset` on.

        UserError for a file or a range that the index does not know; Damaged if a block is nowhere
        as the index says.
        """
        entry, block_bytes = self._entry(name), self._open().block_bytes
        if not 0 <= offset <= offset + size <= entry.size:
            raise UserError(
                f"{name or self._roots[0]} has {entry.size} bytes: {size} at {offset} are not in it"
            )
        parts, stop = [], offset + size
        while offset < stop:
            block = offset // block_bytes
            begin = block * block_bytes
            end = min(stop, begin + block_bytes)
            parts.append(self._part(entry, block, offset - begin, end - begin))
            offset = end
        return b"".join(parts)

    def close(self) -> None:
        """Close all files; they are opened again when they are read."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    def _open(self) -> FileIndex:
        if self._index is None:
            self._index = read_index(self._index_path, FileIndex)
            self._files = {file.name: file for file in self._index.files}
        return self._index

    def _entry(self, name: str) -> FileEntry:
        self._open()
        if name not in self._files:
            known = ", ".join(map(repr, list(self._files)[:5]))
            raise UserError(f"{self._index_path} knows no file {name!r}, but {known}")
        return self._files[name]

    def _part(self, entry: FileEntry, block: int, start: int, stop: int) -> bytes:
        """Return a part of a block, which is verified as a whole when it is first read."""
        begin = block * self._open().block_bytes
        known = self._good.get((entry.name, block))
        if known is not None:
            data = self._pread(entry.name, known, begin + start, stop - start)
            if len(data) == stop - start:
                return data
        return self._read_verified(entry, block)[start:stop]

    def _read_verified(self, entry: FileEntry, block: int) -> bytes:
        block_bytes = self._open().block_bytes
        begin = block * block_bytes
        size = min(block_bytes, entry.size - begin)
        problem = "differs from the index"
        for which in range(len(self._roots)):
            for attempt in range(READS):
                try:
                    data = self._pread(entry.name, which, begin, size)
                except OSError as error:
                    problem = f"cannot be read ({first_line(error)})"
                    self._handles.pop((entry.name, which), None)
                    continue
                if block_digest(data) == entry.digest(block):
                    if which or attempt:
                        where = f"from {self._roots[which]}" if which else "at the second reading"
                        self.healed.append(f"block {block} of {entry.name!r} is sound {where}")
                    self._good[entry.name, block] = which
                    return data
        count = blocks_of(entry.size, block_bytes)
        raise Damaged(
            f"block {block} of {count} of {self._roots[0] / entry.name} {problem}"
            + (", and so in all mirrors" if len(self._roots) > 1 else "")
        )

    def _pread(self, name: str, which: int, offset: int, size: int) -> bytes:
        key = name, which
        if key not in self._handles:
            path = self._roots[which] / name if name else self._roots[which]
            self._handles[key] = open_regular(path)
        parts = []
        while size and (data := os.pread(self._handles[key], size, offset)):
            parts.append(data)
            offset, size = offset + len(data), size - len(data)
        return b"".join(parts)
