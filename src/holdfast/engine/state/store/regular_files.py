"""Opens files that another process may have replaced by odd ones: that fails at once, and never
hangs.

Opening a pipe waits for its other end, and reading a device may never end. So only a regular file
is opened; the `strerror` of the OSError names any other kind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Protocol

DOCUMENT_BYTES_MAX = 16 << 20  # a small file of a run directory
GROWTH_BYTES_MAX = 64 << 10  # a file may grow by so much while it is read
WRITER_S_MAX = 5.0  # a reader of a pipe waits so long for its writer
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
    _refuse_odd(descriptor, path, allowed=(stat.S_ISCHR,))
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

    A line of more than `bytes_max` bytes comes in pieces; only the last one is whole. Holes of a
    sparse file are skipped.
    """
    with contextlib.suppress(OSError), regular_stream(path) as file:
        for line in iter(lambda: file.readline(bytes_max), b""):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == bytes_max:
                file.seek(skip_hole(file.fileno(), file.tell()))


def read_end(path: str | os.PathLike[str], bytes_max: int) -> list[bytes]:
    """Return the last lines of a file, in `bytes_max` bytes. OSError.

    The first one may lack its beginning, and the last one its end; it is empty if it does not.
    """
    with regular_stream(path) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - bytes_max, 0))
        return file.read(bytes_max).split(b"\n")


def skip_hole(descriptor: int, at: int) -> int:
    """Return the next place with data in a file, from a place in it; its end if there are none.

    A sparse file of a few blocks can claim to have terabytes. OSError.
    """
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(at, os.fstat(descriptor).st_size)


def read_regular(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Read a whole file of at most `bytes_max` bytes. OSError, also if it is larger."""
    with regular_stream(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > bytes_max:
            why = f"it has {size} bytes, more than the {bytes_max} that can be right"
            raise OSError(errno.EFBIG, why, os.fspath(path))
        # With bytes_max here, Python would take that much memory for any small file.
        return file.read(min(size + GROWTH_BYTES_MAX, bytes_max))


def read_up_to(stream: Readable, bytes_max: int) -> bytes:
    """Read a stream to its end, at most `bytes_max` bytes; the limit itself takes no memory."""
    parts: list[bytes] = []
    left = bytes_max
    while left and (part := stream.read(min(left, READ_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a small file of JSON. OSError; ValueError."""
    return parse_json(read_regular(path, DOCUMENT_BYTES_MAX))


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a text of JSON.

    ValueError describes the error; numbers that are not finite and deep nesting are errors, too.
    """
    try:
        return json.loads(text, parse_float=_require_finite, parse_constant=_require_finite)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def read_named(path: str | os.PathLike[str], bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes:
    """Read a small file that a command line names: a regular one, or a pipe, as a shell makes them.

    OSError if it is of another kind or large, or if the pipe stays empty for too long.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    _refuse_odd(descriptor, path, allowed=(stat.S_ISFIFO,))
    data, waiting = bytearray(), select.poll()
    waiting.register(descriptor, select.POLLIN)
    with os.fdopen(descriptor, "rb", 0) as file:
        while len(data) <= bytes_max:
            if not waiting.poll(WRITER_S_MAX * 1000):
                why = f"nothing came through this pipe in {WRITER_S_MAX:g} s"
                raise OSError(errno.ETIMEDOUT, why, os.fspath(path))
            part = file.read(min(GROWTH_BYTES_MAX, bytes_max + 1 - len(data)))
            if not part:
                return bytes(data)
            data += part
    why = f"it has more than the {bytes_max} bytes that can be right"
    raise OSError(errno.EFBIG, why, os.fspath(path))


def _refuse_odd(
    descriptor: int,
    path: str | os.PathLike[str],
    *,
    allowed: Sequence[Callable[[int], bool]] = (),
) -> None:
    """Close a descriptor that is of no regular file, nor of an allowed kind: OSError."""
    mode = os.fstat(descriptor).st_mode
    if not any(is_kind(mode) for is_kind in (stat.S_ISREG, *allowed)):
        os.close(descriptor)
        raise _make_error(path)


def _make_error(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def _require_finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:20]} is no finite number")
    return found
