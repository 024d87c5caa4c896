"""Knows the nodes of a job that are connected or expected, and passes orders and questions on.

The ends of workers' logs come from their nodes, or else from the run directory.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from holdfast.engine.core.types import AgentId
from holdfast.engine.net.channel import Channel
from holdfast.engine.records.run_tail import read_log_end
from holdfast.engine.wire.messages import (
    DrainRequest,
    LabelRequest,
    LogReply,
    LogRequest,
    MoveRequest,
)

NODE_S = 2.0  # a node may take so long to answer
JOIN_S = 10.0  # from a node's question for the job to the start of its agent
JOINING_MAX = 1024


class ConnectedNodes:
    """Keeps the connections of agents, and counts the nodes that have yet to start theirs.

    `awaited`: the fleet's last report of nodes that the cluster manager does not give.
    """

    def __init__(self) -> None:
        self.awaited = ""
        self._channels: dict[AgentId, Channel] = {}
        self._until: list[float] = []  # monotonic; one for each node that has asked for the job
        self._come: set[AgentId] = set()

    def __bool__(self) -> bool:
        return bool(self._channels)

    def record_question(self, now: float) -> None:
        """Record that a node has asked what the job is."""
        waiting = [until for until in self._until if now < until]
        self._until = [*waiting[-JOINING_MAX:], now + JOIN_S]

    def record_report(self, agent: AgentId, channel: Channel, now: float) -> None:
        """Record that an agent is here, which one node was expected to start."""
        self._channels[agent] = channel
        if agent not in self._come:
            self._come.add(agent)
            self._until = [until for until in self._until if now < until][1:]

    def remove(self, agent: AgentId, channel: Channel) -> bool:
        """Forget a connection; return whether it was the agent's present one."""
        if self._channels.get(agent) is not channel:
            return False
        del self._channels[agent]
        return True

    def expects_any(self, now: float) -> bool:
        """Return whether a node that has asked for the job may still start its agent."""
        return any(now < until for until in self._until)

    def find(self, agent: AgentId | None) -> Channel | None:
        return self._channels.get(agent) if agent is not None else None

    def send_all(self, message: object) -> None:
        for each in self._channels.values():
            each.send(message)

    def pass_on(self, message: DrainRequest | MoveRequest | LabelRequest) -> str:
        """Pass an order on to its node, which then reports it; return a problem, or ""."""
        channel = self._channels.get(message.agent)
        if channel is None:
            names = ", ".join(sorted(self._channels)) or "none"
            return f"there is no node {message.agent!r} just now; the connected ones: {names}"
        channel.send(message)
        return ""


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
