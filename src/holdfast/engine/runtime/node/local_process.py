"""Waits in an event loop for a process of this node, and for its output.

A process is started here or forked by the fork server; both are waited for in the same way.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from typing import IO, Any, ClassVar

from holdfast.engine.runtime.node.fork_server import ForkedProcess


class LocalProcess(subprocess.Popen[bytes]):
    """Is a process that this one has started. `living`: the ids of those not yet collected."""

    living: ClassVar[set[int]] = set()

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, **options)
        self.living.add(self.pid)

    def collect(self) -> int:
        """Wait for the exit status: negative for the signal that ended it."""
        code = self.wait()
        self.living.discard(self.pid)
        return code

    def end_descriptor(self) -> int:
        """Return a descriptor that becomes readable once the process has ended; close it."""
        return os.pidfd_open(self.pid)


async def wait_for_end(process: LocalProcess | ForkedProcess) -> int:
    """Wait for the end of a process; returns its status, negative for a signal."""
    try:
        descriptor = process.end_descriptor()
    except OSError:  # no descriptors are left
        return await asyncio.to_thread(process.collect)
    try:
        await wait_until_readable(descriptor)
    finally:
        os.close(descriptor)
    return process.collect()


async def wait_until_readable(descriptor: int) -> None:
    """Wait until there is something to read, or the other end is closed."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set_once, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def read_chunks(pipe: IO[bytes] | None) -> AsyncIterator[bytes]:
    """Yield the bytes of a pipe until the other end is closed, and close it."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while data := await reader.read(1 << 16):
            yield data
    finally:
        transport.close()


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
