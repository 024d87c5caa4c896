"""Finds out whether the kernel has killed a process because memory ran out.

The kernel's log names the process, where it can be read and numbers processes as we do. Otherwise
a control group counts such kills, and a count that has just grown explains a SIGKILL that nobody
else has sent.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from holdfast.engine.host.kernel_log import DEVICE, LINE_MAX, RECORDS_MAX, KernelLog

WINDOW_S = 10.0  # a process with much memory takes as long to end after its kill
_KILLED = re.compile(r"ut of memory: Killed process (\d+) ")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """Watches the count of one control group. `look` at it often."""

    def __init__(
        self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup"), log: Path = DEVICE
    ) -> None:
        self._proc = proc
        self._groups = groups
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
        for path in self._find_files():
            with contextlib.suppress(OSError):
                if found := _COUNT.search(path.read_text()):
                    return int(found[1])
        return 0

    def _find_files(self) -> Iterator[Path]:
        """Yield the files that may have the count, the best one first."""
        try:
            lines = (self._proc / "self" / "cgroup").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, controllers, place = line.split(":", 2)
            # A container may see the path of its group, or the group itself at the root.
            if controllers == "":
                for folder in (place.lstrip("/"), ""):
                    yield self._groups / folder / "memory.events"
            elif "memory" in controllers.split(","):
                for folder in (place.lstrip("/"), ""):
                    yield self._groups / "memory" / folder / "memory.oom_control"
        yield self._proc / "vmstat"
