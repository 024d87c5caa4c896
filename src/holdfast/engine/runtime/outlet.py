"""Writes to readers and disks that may be slow, in threads, so that no event loop waits.

The waiting bytes are bounded. Beyond the bound lines are dropped and counted until the waiting ones
are written; then one line gives the number of the missing ones.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.state.store.regular_files import append_regular

WAITING_BYTES_MAX = 8 << 20
CHUNK_BYTES = LINE_BYTES_MAX = 64 << 10
LOOK_S = 0.005
# At the end; the launcher waits somewhat longer for its processes.
STALLED_S = 4.0  # for a reader that does not read
FLUSH_S = 8.0  # for all outlets


class Outlet:
    """Passes bytes in order to a function that may block, in a thread of its own."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        describe_lost: Callable[[int], str],
        *,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to write. `write`: an OSError of it loses only the piece that it was given.

        `describe_lost`: returns a line on the number of missing lines, to stand in their place.
        `at_end`: is called in the thread after `close`, once everything is written.
        """
        self._write = write
        self._describe_lost = describe_lost
        self._waiting_bytes_max = waiting_bytes_max
        self._at_end = at_end
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0  # also those of the piece that is being written
        self._written = 0  # pieces
        self._lost = 0  # lines dropped since the last line on them
        self._over = False
        _outlets.add(self)
        threading.Thread(target=self._run, daemon=True, name="outlet").start()

    def put(self, data: bytes) -> None:
        """Write whole lines soon, or drop them. Never waits."""
        with self._changed:
            if self._lost or self._waiting_bytes + len(data) > self._waiting_bytes_max:
                self._lost += data.count(b"\n")
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()

    def flush(self, until: float) -> None:
        """Wait until everything is written: up to `until`, and STALLED_S for any piece."""
        with self._changed:
            while self._waiting_bytes and time.monotonic() < until:
                before = self._written
                self._changed.wait(STALLED_S)
                if self._written == before:
                    return

    def close(self) -> None:
        """End the thread once everything is written. Does not wait."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (data := self._take()) is not None:
            with contextlib.suppress(OSError):  # the reader is gone, or the disk is full
                self._write(data)
            with self._changed:
                self._waiting_bytes -= len(data)
                self._written += 1
                if self._lost and not self._waiting:
                    line = self._describe_lost(self._lost).encode()
                    self._lost = 0
                    self._waiting.append(line)
                    self._waiting_bytes += len(line)
                self._changed.notify_all()
        self._at_end()

    def _take(self) -> bytes | None:
        with self._changed:
            while not self._waiting:
                if self._over:
                    return None
                self._changed.wait()
            return self._waiting.popleft()


class LogFile:
    """Appends to a file without waiting for its disk. `say`: gets a sentence if lines are lost."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._descriptor = -1
        self._has_said = False
        self._outlet = Outlet(self._append, _describe_missing, at_end=self._end)

    def write(self, data: bytes) -> None:
        """Append soon; what the disk does not take in time is dropped, and counted in the file."""
        self._outlet.put(data)

    def close(self) -> None:
        """Close the file once everything is written. Does not wait."""
        self._outlet.close()

    def _append(self, data: bytes) -> None:
        try:
            if self._descriptor < 0:
                self._descriptor = append_regular(self._path)
            write_all(self._descriptor, data)
        except OSError as error:
            # A full disk must not stop training, so the file is reported once.
            if not self._has_said:
                self._say(f"{self._path} lacks lines from here on: {error.strerror}")
            self._has_said = True

    def _end(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class Output:
    """Copies from pipes to outlets. Each is taken by the descriptor from which it is read."""

    def __init__(self, outlets: Mapping[int, Outlet]) -> None:
        self._outlets = outlets
        self._rests = dict.fromkeys(outlets, b"")  # beginnings of unfinished lines
        self._idle = threading.Event()

    def copy(self) -> None:
        """Copy whole lines, for ever."""
        while True:
            self._idle.set()
            ready = wait_readable(self._outlets)
            self._idle.clear()  # before it is read: see `flush`
            for pipe in ready:
                data = self._rests[pipe] + os.read(pipe, CHUNK_BYTES)
                end = data.rfind(b"\n") + 1 if len(data) <= LINE_BYTES_MAX else len(data)
                self._rests[pipe] = data[end:]
                if end:
                    self._outlets[pipe].put(data[:end])

    def flush(self, until: float) -> None:
        """Wait until everything has come out of the pipes."""
        while wait_readable(self._outlets, 0.0) or not self._idle.is_set():
            if time.monotonic() >= until:
                return
            time.sleep(LOOK_S)


_outputs: list[Output] = []  # none or one
_outlets: weakref.WeakSet[Outlet] = weakref.WeakSet()


def free_output(kept_in: str) -> None:
    """Free all writes to standard output and standard error from waiting for a reader.

    Their descriptors lead to pipes which a thread empties. So every writer is covered: prints,
    warnings, tracebacks, and processes that inherit them. `kept_in`: where lines can be found that
    a reader has not taken in time; empty: nowhere.
    """
    targets = {number: os.dup(number) for number in (1, 2)}

    def describe(lost: int) -> str:
        where = f"; they are in {kept_in}" if kept_in else ""
        return f"holdfast: {lost} lines were not shown, because their reader paused{where}\n"

    def report(lost: int) -> str:
        errors.put(describe(lost).encode())
        return ""  # standard output belongs to the script

    errors = lines = Outlet(partial(write_all, targets[2]), describe)
    if not os.path.samestat(os.fstat(1), os.fstat(2)):
        lines = Outlet(partial(write_all, targets[1]), report)
    outlets: dict[int, Outlet] = {}
    for stream, number, outlet in ((sys.stdout, 1, lines), (sys.stderr, 2, errors)):
        stream.flush()
        read, write = os.pipe2(os.O_CLOEXEC)
        os.dup2(write, number)
        os.close(write)
        outlets[read] = outlet
    _outputs.append(Output(outlets))
    threading.Thread(target=_outputs[-1].copy, daemon=True, name="output").start()
    atexit.register(flush_outlets)


def flush_outlets() -> None:
    """Wait for a limited time until readers and disks have everything. For before `os._exit`."""
    until = time.monotonic() + FLUSH_S
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for output in _outputs:
        output.flush(until)
    for outlet in list(_outlets):
        outlet.flush(until)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, however long that takes. OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _describe_missing(lost: int) -> str:
    return f"holdfast: {lost} lines are missing here, because the disk was too slow\n"
