"""Writes a worker's ledger, and waits for room if the file system of the run directory is full.

It waits only where the coordinator has the same directory: then the other workers most likely have
it, too, and no worker could do better. Lines are kept in memory meanwhile, a few steps' at most,
and the worker rests at its next boundary (core/replica/room_wait.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.engine.core.ground.events import EventNoted, RoomSeen
from holdfast.engine.core.membership.event_log import ROOM
from holdfast.engine.records.ledger import (
    LedgerDoubt,
    LedgerEntry,
    LedgerHeader,
    LedgerWriter,
    make_disk_error,
)
from holdfast.engine.train.step.driver import Driver
from holdfast.engine.wire.job_document import COORDINATOR_FILE

AGAIN_S = 1.0  # between two tries to write


class PatientLedger:
    """Writes one worker's ledger, as the module describes. Two threads may use it at once."""

    def __init__(self, path: Path, driver: Driver, patience_s: float) -> None:
        self._run_dir = path.parent.parent
        self._writer = LedgerWriter(path, (self._run_dir / COORDINATOR_FILE).exists)
        self._driver = driver
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._full_since: float | None = None

    def begin(self, header: LedgerHeader) -> None:
        """Write the header of the entries that follow. WorldError."""
        self._write(lambda: self._writer.begin(header))

    def append(self, entry: LedgerEntry) -> None:
        """Write an entry. WorldError."""
        self._write(lambda: self._writer.append(entry))

    def doubt(self, doubt: LedgerDoubt) -> None:
        """Write a doubt. WorldError."""
        self._write(lambda: self._writer.doubt(doubt))

    @property
    def again_s(self) -> float:
        """Return after how long to try again to write lines; infinite if none waits for room."""
        return float("inf") if self._full_since is None else AGAIN_S

    def write_kept(self) -> None:
        """Try again to write the lines that wait for room. WorldError."""
        self._write(lambda: None)

    def _write(self, write: Callable[[], None]) -> None:
        with self._lock:
            write()
            error = self._writer.write_kept()
            since, now = self._full_since, time.monotonic()
            if error is not None and since is not None and now >= since + self._patience_s:
                raise make_disk_error(self._writer.path, error) from error
            has_changed = (error is None) != (since is None)
            if has_changed:
                self._full_since = now if error is not None else None
        if has_changed:
            self._report(error)

    def _report(self, error: OSError | None) -> None:
        """Report to the machine, and to people, whether there is room."""
        text = f"the ledger under {self._run_dir} can grow again: training goes on"
        if error is not None:
            text = (
                f"the ledger under {self._run_dir} cannot grow ({error.strerror}): training waits "
                f"for room there, {self._patience_s:g} s at most; free space"
            )
        self._driver.post(EventNoted(ROOM, text))
        self._driver.post(RoomSeen(error is None))
