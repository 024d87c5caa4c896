"""Follows files that a run appends to: yields the lines that have come since the last look.

A file may not be there yet, may end in half a line, and may be replaced by a shorter one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.engine.state.store.regular_files import open_regular, regular_stream, skip_hole

CHUNK_BYTES = 1 << 20  # a longer line is skipped
LOG_BYTES = 32 << 10  # read from the end of a log
LOG_LINES = 200


class FileTail:
    """Remembers how far one file was read. `cut`: it became shorter, and was read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._inode = 0
        self.cut = False

    def read(self) -> Iterator[bytes]:
        """Yield the new whole lines, without their ends; none if the file cannot be read."""
        with contextlib.suppress(OSError):
            descriptor = open_regular(self._path)
            try:
                found = os.fstat(descriptor)
                if found.st_size < self._at or self._inode not in (0, found.st_ino):
                    self._at, self.cut = 0, True
                self._inode = found.st_ino
                yield from self._lines(descriptor, found.st_size)
            finally:
                os.close(descriptor)

    def _lines(self, descriptor: int, size: int) -> Iterator[bytes]:
        while self._at < size:
            data = os.pread(descriptor, CHUNK_BYTES, self._at)
            whole, newline, _ = data.rpartition(b"\n")
            if not newline:
                if len(data) < CHUNK_BYTES:
                    return  # the line is not finished yet
                self._at = skip_hole(descriptor, self._at + len(data))
                continue
            self._at += len(whole) + 1
            yield from whole.split(b"\n")


def read_log_end(logs: Path, worker: int) -> tuple[str, list[str]]:
    """Return the name and the last lines of a worker's newest log; an empty name: it has none."""
    paths = list_logs(logs, worker)
    return (paths[-1].name, read_last_lines(paths[-1])) if paths else ("", [])


def list_logs(logs: Path, worker: int) -> list[Path]:
    """Return the logs of a worker, the newest incarnation's last."""
    return sorted(logs.glob(f"worker-{worker}-*.log"), key=lambda p: (incarnation_of(p), p.name))


def read_last_lines(log: Path) -> list[str]:
    """Return the last lines of a log; none if it cannot be read."""
    with contextlib.suppress(OSError), regular_stream(log) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - LOG_BYTES, 0))
        lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        begins_whole = size <= LOG_BYTES
        return lines[0 if begins_whole else 1 :][-LOG_LINES:]
    return []


def incarnation_of(log: Path) -> int:
    """Return the incarnation in the name of a worker's log."""
    number = log.stem.split("-")[2]
    return int(number) if number.isdecimal() else -1
