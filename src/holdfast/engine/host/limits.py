"""Keeps the limits between ok, warn and fail, as one value; docs/doctor.md has their sources.

A pair is (warn, fail).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits hold what separates ok, warn and fail; speeds are a second, fractions from 0 to 1."""

    # Against the median of the other machines: below this part of it.
    slow: Pair = (0.7, 0.5)  # arithmetic, memory
    slow_disk: Pair = (0.5, 0.2)  # shared storage varies more, and training waits for it less

    # Memory and processors.
    memory_available: Pair = (0.10, 0.01)  # below this part of what the machine or container has
    swap_used: float = 0.01  # warn above this part of the memory
    swap_pages_per_s: float = 100.0  # warn above, while running
    steal: Pair = (0.02, 0.20)  # above this part of the processors' time
    throttled: float = 0.10  # warn above this part of the scheduling periods
    cpu_pressure: float = 25.0  # warn above this % of the last minute (before a job only)
    memory_pressure: float = 5.0  # the same, for "full"
    io_pressure: float = 25.0

    # What processes may have.
    open_files: Pair = (4096, 512)
    processes: Pair = (4096, 512)
    shared_memory_bytes: Pair = (1 * GIB, 16 * MIB)  # or what the data loaders need, if told

    # Disk.
    disk_free_bytes: Pair = (10 * GIB, 1 * GIB)
    disk_inodes: Pair = (0.05, 0.001)
    disk_write: Pair = (100e6, 10e6)
    disk_sync_s: Pair = (0.02, 1.0)  # median, on a machine that waits for a job
    disk_sync_busy_s: Pair = (5.0, 60.0)  # one, on a node that may be writing a checkpoint
    answer_s: float = 60.0  # a disk or GPU that has not answered for so long while running: fail

    # Network.
    round_trip_s: Pair = (0.01, 0.5)
    network: Pair = (100e6, 10e6)
    clock_s: Pair = (0.1, 1.0)

    # GPU.
    gpu_margin_c: int = 5  # warn when so close to the temperature at which it slows itself down
    gpu_slowdown_c: int = 90  # for one that does not tell that temperature
    gpu_corrected: int = 100  # warn above, since the driver was loaded
    gpu_memory_used_bytes: int = 2 * GIB  # warn above, before a job


def limit_text(sign: str, pair: Pair, scale: float = 1.0) -> str:
    """Put a pair of limits into words, such as: warn above 0.1, fail above 1."""
    return f"warn {sign} {pair[0] / scale:g}, fail {sign} {pair[1] / scale:g}"
