"""Follows the files of a run as they grow: its events, its newest loss, and how fast steps come.

A reader asks now and then; no part of a file is read twice. Must not know processes or sockets.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.engine.records.incidents import Incident, drop_routine, list_incidents, parse_event
from holdfast.engine.records.ledger import LEDGER_DIR, StepLine, decode_line
from holdfast.engine.records.summary import estimate_left_s
from holdfast.engine.records.time_lines import read_last_times
from holdfast.engine.state.store.regular_files import (
    open_regular,
    read_end,
    regular_stream,
    skip_hole,
)

CHUNK_BYTES = 1 << 20  # a longer line is skipped
LOG_BYTES = 32 << 10  # read from the end of a log
LOG_LINES = 200


class FileTail:
    """Yields the lines that have come to a file since the last look.

    The file may not be there yet, may end in half a line, and may be replaced by a shorter one.
    `cut`: it became shorter, and was read again.
    """

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


RATE_S = 10.0  # over which the rate of steps is taken
TAIL_BYTES = 256 << 10
DROP_PARTS = 10  # old events are dropped when a tenth more than wanted are kept


class RunTail:
    """Follows one run. `look` and `look_at_loss` read on; the rest returns the newest values."""

    def __init__(self, run_dir: Path, events_max: int | None = None) -> None:
        """Follow the run in a directory.

        `events_max`: of older events only those are kept that belong to incidents or name the
        workers of the run; 0 keeps none; None keeps all.
        """
        self._events_max = events_max
        self._dropped_at = 0  # how many were left when routine ones were last dropped
        self._path = run_dir
        self._tail = FileTail(run_dir / "events.jsonl")
        self._reached: deque[tuple[float, int]] = deque()
        self.events: list[dict[str, Any]] = []
        self.was_replaced = False  # the log of events, before the last look
        self.loss: float | None = None

    def look(self) -> Sequence[dict[str, Any]]:
        """Read on; return the events that have come since the last look."""
        self._tail.cut = self.was_replaced = False
        found = [event for line in self._tail.read() if (event := parse_event(line)) is not None]
        if self._tail.cut:
            self.was_replaced, self.events, self._dropped_at = True, [], 0
        self.events += found
        if self._events_max is not None:
            self._drop_old(self._events_max)
        return found

    def _drop_old(self, newest: int) -> None:
        if newest == 0:
            self.events = []
        elif len(self.events) > max(newest, self._dropped_at) + newest // DROP_PARTS:
            self.events = drop_routine(self.events, newest)
            self._dropped_at = len(self.events)

    def note_step(self, step: int, now: float) -> None:
        """Take in how many steps are committed at the time `now`, in seconds."""
        reached = self._reached
        reached.append((now, step))
        while len(reached) > 2 and (reached[1][0] < now - RATE_S or reached[1][1] == reached[0][1]):
            # It is too old, or no step was committed before the next look.
            reached.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """Return the number of steps committed per second; None until it is known."""
        if len(self._reached) < 2:
            return None
        (began, first), (ended, last) = self._reached[0], self._reached[-1]
        return max(last - first, 0) / (ended - began) if ended > began else None

    @property
    def incidents(self) -> list[Incident]:
        """Return all incidents so far, oldest first."""
        return list_incidents(self.events)

    def estimate_left_s(self) -> float | None:
        """Return the seconds that the script's present loop still takes; None if unknown."""
        return estimate_left_s(read_last_times(self._path))

    def look_at_loss(self) -> None:
        """Take the newest loss from the end of the ledger's newest file."""
        try:
            paths = list((self._path / LEDGER_DIR).glob("*.jsonl"))
            newest = max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)
            if newest is None:
                return
            lines = read_end(newest, TAIL_BYTES)
        except OSError:
            return
        for data in reversed(lines[:-1]):
            with contextlib.suppress(ValueError):  # a line that is cut off at the front, too
                line = decode_line(data)
                if isinstance(line, StepLine) and line.losses:
                    self.loss = float.fromhex(line.loss)
                    return
