"""Ask the kernel about a process: its state, and whether any of its threads was scheduled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import NamedTuple

from holdfast.engine.core.membership.liveness import ProcessSample

THREADS_MAX = 64  # the control thread is among the first; more would only cost


def sample_process(pid: int) -> ProcessSample | None:
    """Take one look at a process; None when it has gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])  # user and system time, all threads
    return ProcessSample(state=fields[0], progress=ticks + _switches(pid))


def start_time(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks since boot; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _switches(pid: int) -> int:
    """Count the context switches of all threads: they grow even while a process only waits."""
    total = 0
    with contextlib.suppress(OSError):
        for tid in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:THREADS_MAX]:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{tid}/status") as file:
                text = file.read()
                for line in text[text.rfind("voluntary_ctxt_switches") - 40 :].splitlines():
                    if "voluntary_ctxt_switches" in line:
                        total += int(line.split()[1])
    return total


class SessionUse(NamedTuple):
    """Sums up the living processes of a session. Memory that they share counts for each."""

    cpu_s: float
    memory_bytes: int


def measure_sessions(leaders: Collection[int]) -> dict[int, SessionUse]:
    """Measure these sessions, by their leaders; a session without a process is left out."""
    found: dict[int, SessionUse] = {}
    tick_s, page_bytes = 1.0 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            if (session := int(fields[3])) in leaders:
                cpu_s, memory_bytes = found.get(session, (0.0, 0))
                cpu_s += (int(fields[11]) + int(fields[12])) * tick_s
                memory_bytes += int(fields[21]) * page_bytes
                found[session] = SessionUse(cpu_s, memory_bytes)
    return found
