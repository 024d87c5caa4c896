"""Measures how busy this machine is, and each of the sessions that workers and their helpers are.

One look reads the `stat` file of each process and a few files of the kernel. Values are totals, so
a difference of two looks has what was used in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.engine.host.host import HostReader
from holdfast.engine.host.lifetime import SessionUse, measure_sessions

IDLE = (3, 4)  # the places of idle and iowait among the ticks of /proc/stat
INFINIBAND_BYTES = 4  # its ports count in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Describes one look. `cpu_s`: processor seconds since boot. `sessions`: by their leaders."""

    at: float
    at_s: float
    cpu_s: float
    memory_bytes: int
    received: int
    sent: int
    sessions: dict[int, SessionUse]


def measure_usage(reader: HostReader, leaders: Collection[int]) -> Usage:
    """Measure this machine and some sessions once. `leaders`: process ids that lead sessions."""
    memory = reader.memory()
    words = reader.files.text("proc/stat").partition("\n")[0].split()[1:9]
    ticks = sum(int(word) for n, word in enumerate(words) if n not in IDLE)
    received, sent = _count_bytes(reader)
    return Usage(
        at=time.time(),
        at_s=time.monotonic(),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        memory_bytes=memory.usable_bytes - memory.free_bytes,
        received=received,
        sent=sent,
        sessions=measure_sessions(leaders),
    )


def _count_bytes(reader: HostReader) -> tuple[int, int]:
    """Return the bytes that this machine has received and sent, without those to itself.

    Bridges and tunnels carry bytes that a device counts as well; without any device all count.
    """
    files, counts = reader.files, {}
    for line in files.text("proc/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() != "lo" and len(fields) > 8:
            counts[name.strip()] = int(fields[0]), int(fields[8])
    devices = [n for n in counts if files.names(f"sys/class/net/{n}/device")]
    found = [counts[name] for name in devices or counts]
    base = "sys/class/infiniband"
    for device in files.names(base):
        for port in files.names(f"{base}/{device}/ports"):
            counters = f"{base}/{device}/ports/{port}/counters/port"
            both = (files.number(f"{counters}_{way}_data") or 0 for way in ("rcv", "xmit"))
            received, sent = both
            found.append((received * INFINIBAND_BYTES, sent * INFINIBAND_BYTES))
    return sum(each[0] for each in found), sum(each[1] for each in found)
