"""Measures the memory that this process can still take."""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.engine.core.errors import UserError

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60


def piece_bytes(budget_mb: int | None) -> int:
    """Return the bytes of this node's memory for pieces: by default half of the free ones."""
    return free_bytes() // 2 if budget_mb is None else budget_mb * 10**6


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Return the bytes that are free: of the machine, or of the control group if that has less."""
    found = UNLIMITED
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        most = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        if most != "max":
            found = min(found, max(int(most) - used, 0))
    return found


def check_room(needed: int, what: str) -> None:
    """Raise UserError if `what` takes more bytes of memory than are free on this machine."""
    free = free_bytes()
    if needed > free:
        raise UserError(
            f"{what} takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free here: "
            "use a machine with more, or check that this is the right checkpoint"
        )
