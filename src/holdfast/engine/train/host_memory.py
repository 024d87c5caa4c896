"""Keeps the memory that a step frees, so that the next step can use it again.

glibc gives memory at the top of the heap back to the kernel as soon as it is free. An optimizer's
temporaries are freed after every step, and the kernel then has to find and clear the same pages
again in the next: thousands of page faults a step. The memory kept here never exceeds a step's
peak.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_TUNES = "glibc.malloc."
KEPT_BYTES_MAX = 1 << 30  # free memory at the top of the heap
HEAP_BLOCK_BYTES_MAX = 32 << 20  # larger blocks are mapped one by one: glibc allows no more


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Set glibc's limits for this process; False if the user has, or if it is not glibc."""
    if any(name in environ for name in _USERS) or _TUNES in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting either limit ends glibc's own adapting of both, so both are set.
    limits = ((_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES_MAX), (_M_TRIM_THRESHOLD, KEPT_BYTES_MAX))
    return all(mallopt(name, value) == 1 for name, value in limits)
