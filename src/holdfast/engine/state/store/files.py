"""Implements a storage in a directory of a local or shared file system.

An object is written under a temporary name, made durable, then renamed. Writes go past the page
cache from a few buffers, so that a checkpoint neither waits for memory nor drives out what training
needs; the copy into a buffer follows right after the caller has digested the part, from the cache.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.state.store.disk_calls import BLOCK_BYTES, Disk, RealDisk, aligned
from holdfast.engine.state.store.manifest import PACKS, digest, token_of
from holdfast.engine.state.store.owner_process import has_ended, name_scope
from holdfast.engine.state.store.regular_files import open_regular
from holdfast.engine.state.store.storage import Missing, check_name

BUFFER_BYTES = 8 << 20
BUFFERS = 3
UNFINISHED = ".unfinished"  # folder of files that are being written
WHAT_MAX = 100  # characters of an object's name in the name of its unfinished file
_SLASH = "+"  # stands for "/" there: no object's name has one
_PACKS = PACKS.replace("/", _SLASH)


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
