"""Gets the ends of workers' logs for viewers: from their nodes, else from the run directory."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from holdfast.engine.net.channel import Channel
from holdfast.engine.records.file_tails import read_log_end
from holdfast.engine.wire.messages import LogReply, LogRequest

NODE_S = 2.0  # how long a node may take to answer


class LogDesk:
    """Keeps the questions that nodes have not answered yet. For one event loop."""

    def __init__(self, logs: Path) -> None:
        """Take the folder of logs in the coordinator's own run directory."""
        self._logs = logs
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[LogReply]] = {}

    async def find(self, request: LogRequest, node: Channel | None) -> LogReply:
        """Return the end of a worker's log. `node`: the way to its node, if it is connected."""
        found = await self._ask_node(request, node) if node is not None else None
        if found is None or not found.name:
            name, lines = await asyncio.to_thread(read_log_end, self._logs, request.worker)
            return LogReply(number=request.number, name=name, lines=tuple(lines))
        return LogReply(number=request.number, name=found.name, lines=found.lines)

    def take(self, reply: LogReply) -> None:
        """Hand a node's answer to its asker, unless that has stopped waiting."""
        waiting = self._open.pop(reply.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def _ask_node(self, request: LogRequest, node: Channel) -> LogReply | None:
        number = next(self._numbers)
        waiting = self._open[number] = asyncio.get_running_loop().create_future()
        node.send(LogRequest(worker=request.worker, number=number))
        try:
            return await asyncio.wait_for(waiting, NODE_S)
        except asyncio.TimeoutError:
            return None
        finally:
            self._open.pop(number, None)
