"""Keeps digests of training data: of the blocks of files, or of the samples of a dataset.

An index describes data while it is sound, so that later reads from a disk or a network can be
compared with it. The file: a magic word, the head's length, the head (MessagePack), the digests,
and a digest of all these. It is written under another name first, and no part of it is trusted
before its own digest is right.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import xxhash

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.release import newer_format
from holdfast.engine.state.store.regular_files import read_regular, regular_stream

MAGIC = b"HOLDIDX1"
DIGEST_BYTES = 16  # xxh3-128
BLOCK_BYTES = 512 << 10
BLOCK_BYTES_MIN, BLOCK_BYTES_MAX = 4 << 10, 64 << 20
INDEX_BYTES_MAX = 1 << 34
_LENGTH = struct.Struct("<I")
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Block = Annotated[int, msgspec.Meta(ge=BLOCK_BYTES_MIN, le=BLOCK_BYTES_MAX)]


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

    name: str  # below the directory, with slashes; empty if the index is of this file alone
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


Seen = Callable[[int], None]  # called with the number of bytes just read


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
