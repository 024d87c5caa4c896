"""Notices files that tasks write and read back while something else changes them as well.

A task that writes to a file and reads it at once is a pure function on one worker. Two workers of
one machine share the file, so one may read the other's bytes. Python's audit hooks tell the name of
each opened file. No hook can be removed, so the whole process has one hook, and it asks the task of
the calling thread. It sees no files of C code except databases of sqlite3.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

FILES_MAX = 256  # the newest ones are remembered
TOLD_MAX = 4  # messages of one worker
_WRITES = os.O_WRONLY | os.O_RDWR
# The name of a file in a cache decides its content.
_CACHES = ("__pycache__", "torchinductor", ".triton")
Mark = tuple[int, int, int]  # the size, the time of the last change and the inode of a file


class TaskFiles:
    """Remembers which files this worker's tasks write. `tell` is given a sentence for people."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._left: dict[str, Mark] = {}  # the marks of written files at the end of the last task
        self._written: set[str] = set()  # the present task writes to these files
        self._foreign: set[str] = set()  # another worker or thread has changed these files since
        self._told: set[str] = set()

    def begin_task(self) -> None:
        """Record that a task begins on the calling thread."""
        _listen()
        _present.files = self

    def end_task(self) -> None:
        """Record that the task has ended, and mark the files that it has written."""
        _present.files = None
        for path in self._written:
            self._left.pop(path, None)  # the newest file stands last
            if (mark := _mark(path)) is not None:
                self._left[path] = mark
        self._written.clear()
        while len(self._left) > FILES_MAX:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._foreign.discard(oldest)

    def open(self, name: Any, *, reads: bool, writes: bool) -> None:
        """Record that the present task is about to open a file."""
        if not (writes or self._left):
            return
        path = _full_path(name)
        if path is None:
            return
        if path not in self._written and path in self._left:
            now = _mark(path)
            if now is not None and now != self._left[path]:
                self._foreign.add(path)
        if reads and path in self._foreign:
            self._note(path)
        if writes:
            self._written.add(path)

    def _note(self, path: str) -> None:
        self._foreign.discard(path)
        known = path in self._told or len(self._told) == TOLD_MAX
        if known or any(part in path for part in _CACHES):
            return
        self._told.add(path)
        self._tell(
            f"tasks write to the file {os.path.basename(path)} and read it, and something else has "
            f"changed it meanwhile ({path}): if a task reads what another worker has written, the "
            "result depends on the workers; keep what tasks read in the job's state (job.protect, "
            "job.values, job.rank_state), or write to a file of the task's own (tempfile)"
        )


class _Present(threading.local):
    files: TaskFiles | None = None


_present = _Present()


@functools.cache
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event not in ("open", "sqlite3.connect", "os.rename"):
        return
    files = _present.files
    if files is None:
        return
    _present.files = None  # `_mark` opens no file, but a message may
    try:
        if event == "open":
            flags = args[2]
            files.open(args[0], reads=not flags & os.O_WRONLY, writes=bool(flags & _WRITES))
        elif event == "os.rename":
            files.open(args[1], reads=False, writes=True)
        else:
            files.open(args[0], reads=True, writes=True)
    finally:
        _present.files = files


def _full_path(name: Any) -> str | None:
    """Return the path of a file; None for a descriptor or a name that is no path."""
    if isinstance(name, int):
        return None
    try:
        return os.path.abspath(os.fsdecode(name))
    except (TypeError, OSError):  # the present folder may be gone
        return None


def _mark(path: str) -> Mark | None:
    """Return the mark of a file; None if the file is missing or empty."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if not found.st_size:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
