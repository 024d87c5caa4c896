"""Opens files that others may have replaced by odd ones: opening those fails, and nothing hangs.

Opening a pipe waits for its other end, and reading a device may never end. So anything but a
regular file is refused, with an OSError whose `strerror` says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO, Protocol

DOCUMENT_BYTES_MAX = 16 << 20  # a small file of a run directory
READ_BYTES = 1 << 20  # at a time, where the size is not known


class Readable(Protocol):
    """Is a file, a response or a decompressed stream."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""
        ...


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a file for reading; returns its descriptor. OSError, also if it is not regular."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    _refuse_odd(descriptor, path)
    return descriptor


def append_regular(path: str | os.PathLike[str]) -> int:
    """Open a file or device to append to it, or make the file; returns its descriptor.

    OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise _make_error(path) from None
        raise
    _refuse_odd(descriptor, path, devices=True)
    return descriptor


def create_regular(path: str | os.PathLike[str], mode: int = 0o644) -> int:
    """Make a new file in place of an old one, of any kind; returns its descriptor. OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def regular_stream(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a file as a stream of bytes. OSError, also if it is not regular."""
    return os.fdopen(open_regular(path), "rb", buffering)


def read_whole_lines(path: str | os.PathLike[str], bytes_max: int) -> Iterator[bytes]:
    """Yield the lines of a file that are whole; none if it cannot be read.

    A line of more than `bytes_max` bytes comes in pieces; only the last one is whole.
    """
    with contextlib.suppress(OSError), regular_stream(path) as file:
        for line in iter(lambda: file.readline(bytes_max), b""):
            if line.endswith(b"\n"):
                yield line


def read_regular(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Read a whole file of at most `bytes_max` bytes. OSError, also if it is larger."""
    with regular_stream(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > bytes_max:
            why = f"it has {size} bytes, more than the {bytes_max} that can be right"
            raise OSError(errno.EFBIG, why, os.fspath(path))
        return file.read(size)  # a reader takes as much memory as it is asked to read


def read_up_to(stream: Readable, bytes_max: int) -> bytes:
    """Read a stream to its end, at most `bytes_max` bytes; the limit itself takes no memory."""
    parts: list[bytes] = []
    left = bytes_max
    while left and (part := stream.read(min(left, READ_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_named(path: str | os.PathLike[str], bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes:
    """Read a small file that somebody named to us, which may be a pipe. OSError if it is large."""
    with open(path, "rb") as file:
        data = read_up_to(file, bytes_max + 1)
    if len(data) > bytes_max:
        why = f"it has more than the {bytes_max} bytes that can be right"
        raise OSError(errno.EFBIG, why, os.fspath(path))
    return data


def _refuse_odd(descriptor: int, path: str | os.PathLike[str], *, devices: bool = False) -> None:
    """Close a descriptor that is not of a regular file (or device), and raise an OSError."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or (devices and stat.S_ISCHR(mode))):
        os.close(descriptor)
        raise _make_error(path)


def _make_error(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
