"""Bounds what a replay may take: a recording may describe a machine that never stops deciding."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from holdfast.engine.core.errors import Damaged

# Far more than any coordinator has, and needs for one decision.
MEMORY_BYTES_MAX = 2 << 30
DECISION_CPU_S_MAX = 5.0


@contextlib.contextmanager
def limit_memory() -> Iterator[None]:
    """Raise Damaged where the process would take much more memory than it has taken before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    given = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *given]), before[1]))
    try:
        yield
    except MemoryError:
        raise Damaged(
            f"it takes more than {MEMORY_BYTES_MAX >> 30} GiB of memory, which no coordinator does"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def limit_time() -> Iterator[None]:
    """Raise Damaged after much processor time. For the main thread alone, as signals are."""

    def end(number: int, frame: object) -> None:
        raise Damaged(
            f"a decision or the state takes more than {DECISION_CPU_S_MAX:g} s of processor time, "
            "which no coordinator does"
        )

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, DECISION_CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
