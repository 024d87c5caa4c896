"""Measures the use of this node and of its workers every few seconds, and records it.

It sends nothing: the records are a file of the node in its run directory. Measuring and writing
happen in a thread, so that neither the kernel nor a disk holds up the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast.engine.host.host import HostReader
from holdfast.engine.host.usage import Usage, measure_usage
from holdfast.engine.records.usage_lines import UsageHeader, UsageLine, UsageWriter, WorkerUse
from holdfast.engine.runtime.event_loops import DiskLook

EVERY_S = 5.0


class UsageWatch:
    """Turns looks at this machine into lines. `list_workers`: by worker, the process that leads."""

    def __init__(
        self,
        run_dir: Path,
        node: str,
        host: str,
        list_workers: Callable[[], dict[int, int]],
    ) -> None:
        self._reader = HostReader()
        self._place = run_dir, node, host
        self._list_workers = list_workers
        self._writer: UsageWriter | None = None
        self._before: Usage | None = None

    async def run(self, every_s: float = EVERY_S) -> None:
        """Measure until cancelled."""
        look = DiskLook(self.look, None)
        while True:
            await look.ask()
            await asyncio.sleep(every_s)

    def look(self) -> None:
        """Measure once, and record the use since the last look."""
        workers = self._list_workers()
        now = measure_usage(self._reader, set(workers.values()))
        before, self._before = self._before, now
        if before is None:
            return
        if self._writer is None:
            run_dir, node, host = self._place
            sample = self._reader.sample()
            header = UsageHeader(node, host, sample.cpu.visible, sample.memory.usable_bytes)
            self._writer = UsageWriter(run_dir, header)
        self._writer.append(make_line(before, now, workers))


def make_line(before: Usage, now: Usage, workers: dict[int, int]) -> UsageLine:
    """Return the use between two looks. `workers`: by worker, the process that leads it.

    Totals may fall: a device comes back, or a process that a worker has started ends.
    """
    span_s = max(now.at_s - before.at_s, 1e-9)
    uses = {}
    for worker, pid in workers.items():
        if pid in now.sessions and pid in before.sessions:
            used, known = now.sessions[pid], before.sessions[pid]
            cores = max(used.cpu_s - known.cpu_s, 0.0) / span_s
            uses[worker] = WorkerUse(round(cores, 3), used.memory_bytes)
    return UsageLine(
        at=round(now.at, 3),
        span_s=round(span_s, 3),
        cores=round(max(now.cpu_s - before.cpu_s, 0.0) / span_s, 3),
        memory_bytes=now.memory_bytes,
        received=round(max(now.received - before.received, 0) / span_s),
        sent=round(max(now.sent - before.sent, 0) / span_s),
        workers=uses,
    )
