"""Read what the kernel wrote about broken hardware, from /dev/kmsg, without waiting for more.

Lines are only ever compared with fixed patterns, and cut before they are shown.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.host.checks_trials import LOG_KINDS, KernelLogSample

DEVICE = Path("/dev/kmsg")
RECORD_BYTES_MAX = 8192
RECORDS_MAX = 20_000  # a look at the whole log
AGE_S = 86_400.0
LINE_MAX = 120
XIDS_MAX = 64  # remembered


@dataclass(slots=True)
class KernelLogTally:
    """Counts the lines of each kind of trouble, and keeps the newest."""

    counts: dict[str, tuple[int, str]] = field(default_factory=dict)
    xids: list[tuple[str, int]] = field(default_factory=list)

    def add(self, line: str) -> None:
        xid = LOG_KINDS["gpu"][0].search(line)
        if xid is not None:
            self.xids = [*self.xids, (xid[1].lower(), int(xid[2]))][-XIDS_MAX:]
            return
        for kind, (pattern, _) in LOG_KINDS.items():
            if pattern.search(line):
                count, _ = self.counts.get(kind, (0, ""))
                self.counts[kind] = (count + 1, line[:LINE_MAX])
                return

    def sample(self) -> KernelLogSample:
        counts = tuple((kind, count, line) for kind, (count, line) in self.counts.items())
        return KernelLogSample(counts=counts, xids=tuple(self.xids))


def parse_record(record: str) -> tuple[float, str] | None:
    """Split a record into (seconds since the machine was started, text); None if it is none."""
    head, semicolon, text = record.partition(";")
    fields = head.split(",")
    if not semicolon or len(fields) < 3 or not fields[2].isdecimal():
        return None
    return int(fields[2]) / 1e6, text.partition("\n")[0]


class KernelLog:
    """Follows the kernel's lines as they come."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._descriptor = -1

    def open(self, *, from_end: bool) -> str:
        """Open the device; returns why there is nothing to read, or an empty text."""
        try:
            self._descriptor = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if from_end:
                os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.close()
            return f"the kernel's log cannot be read: {error.strerror}"
        return ""

    def lines(self, records_max: int, newer_than_s: float) -> list[str]:
        """Read the next lines without waiting. `newer_than_s`: since the machine was started."""
        found = []
        for _ in range(records_max):
            try:
                record = os.read(self._descriptor, RECORD_BYTES_MAX)
            except BrokenPipeError:
                continue  # older records were overwritten meanwhile: go on with the oldest left
            except OSError:
                break
            parsed = parse_record(record.decode("utf-8", errors="replace"))
            if not record:
                break
            if parsed is not None and parsed[0] >= newer_than_s:
                found.append(parsed[1])
        return found

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_log(device: Path = DEVICE) -> KernelLogSample:
    """Read the last day of the log."""
    log = KernelLog(device)
    unreadable = log.open(from_end=False)
    if unreadable:
        return KernelLogSample(unreadable=unreadable)
    tally = KernelLogTally()
    try:
        for line in log.lines(RECORDS_MAX, time.clock_gettime(time.CLOCK_BOOTTIME) - AGE_S):
            tally.add(line)
    finally:
        log.close()
    return tally.sample()
