"""Declares the few operating system calls of a directory storage whose order makes it durable.

They are behind a protocol, so that tests can crash between any two of them and lose bytes that
were not synced.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import Protocol

BLOCK_BYTES = 4096  # direct writes need memory, offsets and lengths in multiples of it


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
