"""Starts, watches and ends the servers of a hosted service on one node, for `ServerHost`.

Everything runs in the agent's event loop. The output of a server goes to a log file in the run
directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import IO

from holdfast.engine.core.errors import assert_never
from holdfast.engine.core.hosted_service import RunningServer
from holdfast.engine.core.membership import server_host as machine
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.engine.core.types import Tick
from holdfast.engine.host.lifetime import sample_process
from holdfast.engine.runtime.event_loops import DeadlineTimer
from holdfast.engine.runtime.node import service_process
from holdfast.engine.runtime.node.fork_server import (
    ForkedProcess,
    LocalProcess,
    read_chunks,
    start_process,
    wait_for_end,
    wait_until_readable,
)
from holdfast.engine.runtime.node.worker_process import WorkerTemplate, say
from holdfast.engine.runtime.outlet import LogFile

ADDRESS_BYTES_MAX = 1024
TICK_S_MIN = 0.01
# A server waits for requests, so only the kernel's word counts; half a second of it is enough.
FREEZE = FreezePolicy(stopped_samples=2, silent_samples=1 << 60)


class ServerProcesses:
    """Drives one ServerHost. `tell`: is called with the servers that listen when these change."""

    def __init__(
        self,
        host: machine.ServerHost,
        template: WorkerTemplate,
        tell: Callable[[tuple[RunningServer, ...]], object],
    ) -> None:
        self._host = host
        self._template = template
        self._tell = tell
        self._pids: dict[tuple[int, int], int] = {}  # by number and incarnation
        self._detectors: dict[tuple[int, int], FreezeDetector] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = DeadlineTimer(lambda: self.handle(Tick()), TICK_S_MIN)

    def handle(self, event: machine.HostEvent) -> None:
        """Feed the machine, and carry out its decisions."""
        for effect in self._host.handle(event, time.monotonic()):
            match effect:
                case machine.StartServer(number, incarnation):
                    task = asyncio.ensure_future(self._run(number, incarnation))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case machine.EndServer(number, incarnation):
                    self._kill(number, incarnation)
                case machine.TellServers():
                    self._tell(self._host.report())
                case _:
                    assert_never(effect)
        self._timer.set(self._host.deadline())

    async def watch(self) -> None:
        """Look for servers that are stopped, for ever."""
        while True:
            for (number, incarnation), pid in list(self._pids.items()):
                sample, detector = sample_process(pid), self._detectors[number, incarnation]
                if sample is not None and detector.observe(sample):
                    self.handle(machine.ServerFroze(number, incarnation))
            await asyncio.sleep(FREEZE.sample_s)

    def end(self) -> None:
        """Kill all servers of this node, and start none again."""
        self.handle(machine.BookArrived((), over=True))

    def _kill(self, number: int, incarnation: int) -> None:
        pid = self._pids.get((number, incarnation))
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def _run(self, number: int, incarnation: int) -> None:
        """Start one process, and wait for its end."""
        try:
            process, address_fd = await self._start()
        except OSError as error:
            say(f"server {number}: {error}")
            self.handle(machine.ServerEnded(number, incarnation))
            return
        self._pids[number, incarnation] = process.pid
        self._detectors[number, incarnation] = FreezeDetector(FREEZE)
        logs = [
            asyncio.ensure_future(self._log(p, number)) for p in (process.stdout, process.stderr)
        ]
        address = await _read_line(address_fd)
        if address:
            event = machine.ServerListens(number, incarnation, address, process.pid)
            self.handle(event)
        await wait_for_end(process)
        del self._pids[number, incarnation], self._detectors[number, incarnation]
        await asyncio.gather(*logs, return_exceptions=True)
        self.handle(machine.ServerEnded(number, incarnation))

    async def _start(self) -> tuple[LocalProcess | ForkedProcess, int]:
        """Start a process; return it, and the descriptor that yields its address. OSError."""
        read, write = os.pipe()
        try:
            environment = self._template.common_environment()
            environment[service_process.ADDRESS_FD] = str(write)
            return await start_process([service_process.MODULE], environment, (write,)), read
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)

    async def _log(self, pipe: IO[bytes] | None, number: int) -> None:
        """Append what a server writes to its log."""
        log = LogFile(self._template.run_dir.logs / f"server-{number}.log", say)
        try:
            async for data in read_chunks(pipe):
                log.write(data)
        finally:
            log.close()


async def _read_line(descriptor: int) -> str:
    """Return the line that a process writes before it closes its end, or ""."""
    data = b""
    try:
        while len(data) < ADDRESS_BYTES_MAX and not data.endswith(b"\n"):
            await wait_until_readable(descriptor)
            more = os.read(descriptor, ADDRESS_BYTES_MAX)
            if not more:
                return ""
            data += more
    finally:
        os.close(descriptor)
    return data.decode(errors="replace").strip()
