"""Reads the kernel's lines about broken hardware and killed processes, from /dev/kmsg.

Reading does not wait for more lines. They are only ever compared with fixed patterns, and cut
before they are shown. Where the log can be read, and numbers processes as we do, it names a process
that the kernel has killed because memory ran out. Otherwise a control group counts such kills, and
a count that has just grown explains a SIGKILL that no other process has sent.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.host.checks_trials import LOG_KINDS, KernelLogSample
from holdfast.engine.host.host import ControlGroups, KernelFiles

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
        """Open the device; return the reason why it cannot be read, or an empty text."""
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
                continue  # older records were overwritten: continue with the oldest left
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


WINDOW_S = 10.0  # a process with much memory takes as long to end after its kill
_KILLED = re.compile(r"ut of memory: Killed process (\d+) ")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """Watches the count of one control group. `look` at it often."""

    def __init__(self, root: Path = Path("/"), log: Path = DEVICE) -> None:
        self._files = KernelFiles(root)
        self._log = log
        self._seen: deque[tuple[float, int]] = deque()  # times and counts, of the last seconds
        self._explained: deque[float] = deque()  # times of kills that one process each has had

    def look(self, now: float) -> int:
        """Read the count; return by how much it has grown in the last seconds."""
        count = self._read_count()
        self._seen.append((now, count))
        while len(self._seen) > 1 and self._seen[1][0] < now - WINDOW_S:
            self._seen.popleft()
        while self._explained and self._explained[0] < now - WINDOW_S:
            self._explained.popleft()
        return count - self._seen[0][1]

    def explain(self, pid: int, now: float) -> str:
        """Return the evidence that the kernel has killed this process for lack of memory, or ""."""
        grown = self.look(now)
        if line := self._find_line(pid):
            self._explained.append(now)
            return line
        if grown <= len(self._explained):
            return ""
        self._explained.append(now)
        return "its control group counts the kill"

    def _find_line(self, pid: int) -> str:
        """Return the line of the kernel's log on this process, if it can be read and has one."""
        log = KernelLog(self._log)
        if log.open(from_end=False):
            return ""
        try:
            since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - 2 * WINDOW_S
            lines = log.lines(RECORDS_MAX, since_s)
        finally:
            log.close()
        named = ((line, _KILLED.search(line)) for line in reversed(lines))
        return next((line[:LINE_MAX] for line, m in named if m and int(m[1]) == pid), "")

    def _read_count(self) -> int:
        """Return the number of such kills in this process's control group; 0 if none counts."""
        names = ("memory.events", "memory.oom_control")
        folders = ControlGroups(self._files).list_folders("memory")
        for path in (*(f"{folder}/{name}" for folder in folders for name in names), "proc/vmstat"):
            if found := _COUNT.search(self._files.text(path)):
                return int(found[1])
        return 0
