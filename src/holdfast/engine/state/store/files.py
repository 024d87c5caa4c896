"""Implements a storage in a directory of a local or shared file system.

An object is written under a temporary name, made durable, then renamed. Writes go past the page
cache from a few buffers, so that a checkpoint neither waits for memory nor drives out what training
needs; the copy into a buffer follows right after the caller has digested the part, from the cache.

The few operating system calls whose order makes an object durable are behind the protocol `Disk`,
so that tests can crash between any two of them and lose bytes that were not synced.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.state.store.manifest import PACKS, digest, token_of
from holdfast.engine.state.store.regular_files import open_regular
from holdfast.engine.state.store.storage import Missing, check_name, has_ended, name_scope

BLOCK_BYTES = 4096  # direct writes need memory, offsets and lengths in multiples of it
BUFFER_BYTES = 8 << 20
BUFFERS = 3
UNFINISHED = ".unfinished"  # folder of files that are being written
WHAT_MAX = 100  # characters of an object's name in the name of its unfinished file
_SLASH = "+"  # stands for "/" there: no object's name has one
_PACKS = PACKS.replace("/", _SLASH)


class Disk(Protocol):
    """Declares the calls; each may raise OSError. Paths are absolute."""

    def create(self, path: str) -> int:
        """Create a file for writing, or truncate it if there is one; return a handle."""
        ...

    def write(self, handle: int, data: memoryview, offset: int) -> None:
        """Write all of `data`: whole blocks, from a block's boundary, except at the file's end."""
        ...

    def close(self, handle: int, size: int, keep: bool) -> None:
        """Close a file; with `keep`, it then has exactly this size and is durable.

        It does not yet have its final name.
        """
        ...

    def publish(self, path: str, final: str) -> None:
        """Rename a file durably; folders on the way are made durable as well."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        ...


class RealDisk:
    """Makes the real calls on Linux.

    It writes past the page cache where the file system allows it, at the disk's own speed.
    """

    def create(self, path: str) -> int:
        self._make_folder(os.path.dirname(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return os.open(path, flags, 0o644)

    def write(self, handle: int, data: memoryview, offset: int) -> None:
        while data:
            try:
                written = os.pwrite(handle, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not _undirect(handle):
                    raise
                continue
            data, offset = data[written:], offset + written

    def close(self, handle: int, size: int, keep: bool) -> None:
        try:
            if keep:
                os.ftruncate(handle, size)
                os.fsync(handle)
        finally:
            os.close(handle)

    def publish(self, path: str, final: str) -> None:
        folder = os.path.dirname(final)
        self._make_folder(folder)
        os.rename(path, final)
        _sync_folder(folder)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def _make_folder(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        above = os.path.dirname(folder)
        self._make_folder(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _sync_folder(above)


def aligned(size: int) -> memoryview:
    """Return writable memory fit for direct writes."""
    return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _undirect(handle: int) -> bool:
    """Go through the page cache from here on; False if it did already."""
    import fcntl

    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileStorage:
    """Implements `Storage` in a directory. `disk` does the writing; reads are ordinary."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root.absolute()
        self._disk = disk or RealDisk()
        self._token = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._swept = False

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        path = self._path(name)
        home = digest(name_scope().encode()).hex()
        self._sweep_once(home)
        number = f"{home}-{os.getpid()}-{self._token}-{next(self._numbers)}"
        what = name.replace("/", _SLASH)[:WHAT_MAX]
        temporary = str(self.root / UNFINISHED / f"{number}-{what}")
        try:
            size = self._write(temporary, parts)
            self._disk.publish(temporary, str(path))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise WorldError(f"cannot write {path}: {error.strerror or error}") from None
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        return size

    def read(self, name: str, offset: int, into: memoryview) -> None:
        path = self._path(name)
        try:
            handle = open_regular(path)
        except FileNotFoundError:
            raise Missing(f"there is no {path}") from None
        except OSError as error:
            kind = Damaged if error.errno == errno.EINVAL else WorldError  # EINVAL: not a file
            raise kind(f"cannot read {path}: {error.strerror}") from None
        try:
            while into:
                count = os.preadv(handle, [into], offset)
                if not count:
                    raise Damaged(f"{path} ends at byte {offset}, before it should")
                into, offset = into[count:], offset + count
        except OSError as error:
            kind = Damaged if error.errno == errno.EIO else WorldError  # EIO: the medium is bad
            raise kind(f"cannot read {path}: {error.strerror}") from None
        finally:
            os.close(handle)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise WorldError(f"cannot look at {path}: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path} is not a regular file: remove it")
        return found.st_size

    def names(self, prefix: str) -> list[str]:
        top = self.root / prefix
        found = []

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise WorldError(f"cannot list {error.filename}: {error.strerror}") from None

        for folder, folders, files in os.walk(top, onerror=fail):
            folders[:] = [f for f in folders if f != UNFINISHED]
            found += [str(Path(folder, file).relative_to(self.root)) for file in files]
        return sorted(found)

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            self._disk.remove(str(path))
        except OSError as error:
            raise WorldError(f"cannot delete {path}: {error.strerror}") from None

    def unfinished(self) -> list[Path]:
        """List the files that are being written, or were when their writer ended."""
        return list(self.root.glob(f"{UNFINISHED}/*"))

    def sweep(self, listed: Sequence[Path], tokens: Collection[str]) -> None:
        """Remove listed files of saves that have ended. `tokens`: of the saves under way."""
        for path in listed:
            _, is_pack, what = path.name.rpartition(_PACKS)
            if is_pack and token_of(PACKS + what) not in tokens:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _sweep_once(self, here_name: str) -> None:
        """Remove what writers that have ended here have left unfinished."""
        swept, self._swept = self._swept, True
        for path in [] if swept else self.unfinished():
            home, _, rest = path.name.partition("-")
            pid = rest.partition("-")[0]
            if pid.isdecimal() and has_ended(home == here_name, int(pid)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, name: str) -> Path:
        check_name(name)
        return self.root / name

    def _write(self, path: str, parts: Iterable[bytes | memoryview]) -> int:
        handle, size = self._disk.create(path), 0
        try:
            with ThreadPoolExecutor(1, "holdfast-write") as thread:
                writer = _Writer(self._disk, handle, thread)
                for part in parts:
                    writer.add(memoryview(part).cast("B"))
                size = writer.finish()
        except BaseException:
            self._disk.close(handle, size, keep=False)
            raise
        self._disk.close(handle, size, keep=True)
        return size


class _Writer:
    """Fills buffers; one is written while the next is filled."""

    def __init__(self, disk: Disk, handle: int, thread: ThreadPoolExecutor) -> None:
        self._disk = disk
        self._handle = handle
        self._thread = thread
        self._under_way: list[tuple[Future[None], memoryview]] = []
        self._buffer = self._next_buffer()
        self._filled = 0  # bytes in that buffer
        self._offset = 0  # place of the buffer in the file

    def add(self, part: memoryview) -> None:
        for piece in _pieces(part, BUFFER_BYTES - self._filled):
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == BUFFER_BYTES:
                self._submit(BUFFER_BYTES)
                self._buffer = self._next_buffer()

    def finish(self) -> int:
        """Write the rest and return the size in bytes."""
        size = self._offset + self._filled
        if self._filled:
            whole = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
            self._buffer[self._filled : whole] = bytes(whole - self._filled)
            self._submit(whole)
        for write, _ in self._under_way:
            write.result()
        return size

    def _submit(self, count: int) -> None:
        write = self._thread.submit(
            self._disk.write, self._handle, self._buffer[:count], self._offset
        )
        self._under_way.append((write, self._buffer))
        self._offset, self._filled = self._offset + count, 0

    def _next_buffer(self) -> memoryview:
        if len(self._under_way) < BUFFERS - 1:
            return aligned(BUFFER_BYTES)
        write, buffer = self._under_way.pop(0)
        write.result()
        return buffer


def _pieces(part: memoryview, first: int) -> Iterator[memoryview]:
    """Cut `part` into pieces of at most BUFFER_BYTES, the first one of at most `first`."""
    start, room = 0, first
    while start < len(part):
        yield part[start : start + room]
        start, room = start + room, BUFFER_BYTES
