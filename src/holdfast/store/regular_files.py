"""Opens and reads files that somebody else may have put there: odd ones fail, and nothing hangs.

Opening a pipe waits for a writer, and reading a device may never end. So what is not a regular file
is refused, with an OSError whose `strerror` says so.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a file for reading; returns its descriptor. OSError, also if it is not regular."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def regular_stream(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a file as a stream of bytes. OSError, also if it is not regular."""
    return os.fdopen(open_regular(path), "rb", buffering)


def read_regular(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Read a whole file of at most `bytes_max` bytes. OSError, also if it is larger."""
    with regular_stream(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > bytes_max:
            why = f"it has {size} bytes, more than the {bytes_max} that can be right"
            raise OSError(errno.EFBIG, why, os.fspath(path))
        return file.read(bytes_max)
