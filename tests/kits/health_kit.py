"""Helps the tests of health checks."""

from __future__ import annotations

from holdfast.engine.host.findings import Limits

# The effect of other programs on this machine is no part of these tests.
CALM = Limits(
    memory_available=(-1, -1),
    swap_used=2,
    swap_pages_per_s=1e9,
    steal=(2, 2),
    throttled=2,
    cpu_pressure=101,
    memory_pressure=101,
    io_pressure=101,
    open_files=(0, 0),
    processes=(0, 0),
    shared_memory_bytes=(0, 0),
)
