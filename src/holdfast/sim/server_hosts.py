"""Runs servers of tables on simulated nodes, and checks where the coordinator has them.

It knows which processes have all rows: the first one of each server, and later ones once they have
copied the rows from one that has them. If there is none, the job goes back, and a new process has
all rows by that. So no move that was planned may leave the last process with rows behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

from holdfast.core.membership import agent as ag
from holdfast.core.membership.formation import LEAVE_RESERVE_S
from holdfast.core.servers.server_host import (
    BookArrived,
    EndServer,
    HostEvent,
    ServerEnded,
    ServerHost,
    ServerListens,
    StartServer,
    TellServers,
)
from holdfast.core.step.events import HeirsSeen
from holdfast.core.types import AgentId, AgentReport, Directive, JobRecord, ServerPlace, Stage
from holdfast.sim.run_options import Options
from holdfast.sim.wrong_bits import Violation

COPY_S = 2.0  # most that copying all rows may take
START_S = 0.3  # most that a process takes until it listens


class ServerNode(Protocol):
    """Is the node of an agent."""

    name: AgentId
    incarnation: int
    machine: ag.AgentMachine | None

    @property
    def processes(self) -> Mapping[int, Any]: ...

    def handle(self, event: ag.AgentEvent) -> None: ...

    def clock(self) -> float: ...


@runtime_checkable
class ServerUser(Protocol):
    """Is a worker's first process, which reads rows."""

    machine: Any

    def feed(self, event: Any) -> None: ...


class ServerWorld(Protocol):
    """Is the world around the nodes."""

    @property
    def options(self) -> Options: ...

    @property
    def rng(self) -> Random: ...

    @property
    def now(self) -> float: ...

    @property
    def hosts(self) -> Mapping[AgentId, Any]: ...

    def call_later(self, delay_s: float, act: Any, *args: Any) -> None: ...


@dataclass(slots=True, eq=False)
class _Process:
    """Is one process of server `number` on a node."""

    number: int
    address: str
    node: AgentId
    has_rows: bool
    is_alive: bool = True


class ServerHosts:
    """Runs the servers of all nodes. `moves`: how many moved as planned."""

    def __init__(self, world: ServerWorld) -> None:
        self.moves = 0
        self._world = world
        self._hosts: dict[AgentId, ServerHost] = {}
        self._processes: dict[str, _Process] = {}  # by address
        self._told: dict[AgentId, Directive] = {}  # the newest that each node has heard
        self._heard: dict[AgentId, tuple[float, float]] = {}  # when, and when the node is gone
        self._moved_at = 0.0  # when a worker had last come further, as the coordinator has heard
        self._steps: dict[tuple[int, int], int] = {}  # of each worker's process
        self._book: tuple[ServerPlace, ...] = ()  # as it is recorded

    # ------------------------------------------------------------ nodes

    def obey(self, node: ServerNode, directive: Directive) -> None:
        """Start and end the processes that an agent is ordered to run."""
        if not self._world.options.servers:
            return
        self._told[node.name] = directive
        if not directive.undecided:
            event = BookArrived(directive.servers, over=directive.shutdown)
            self._handle(node, node.incarnation, event)

    def end(self, node: ServerNode) -> None:
        """End all processes of a node, with its agent."""
        self._hosts.pop(node.name, None)
        for process in self._processes.values():
            if process.node == node.name:
                process.is_alive = False

    def _handle(self, node: ServerNode, incarnation: int, event: HostEvent) -> None:
        if node.machine is None or node.incarnation != incarnation:
            return
        host = self._hosts.setdefault(node.name, ServerHost(node.name))
        for effect in host.handle(event, node.clock()):
            match effect:
                case StartServer(number, count):
                    delay_s = self._world.rng.uniform(0.0, START_S)
                    self._world.call_later(delay_s, self._listen, node, incarnation, number, count)
                case EndServer(number, count):
                    self._end_process(_address(node, number, count))
                    self._handle(node, incarnation, ServerEnded(number, count))
                case TellServers():
                    node.handle(ag.ServersRun(host.report()))

    def _listen(self, node: ServerNode, incarnation: int, number: int, count: int) -> None:
        if node.machine is None or node.incarnation != incarnation:
            return
        address = _address(node, number, count)
        is_first = all(each.number != number for each in self._processes.values())
        self._processes[address] = _Process(number, address, node.name, is_first)
        self._handle(node, incarnation, ServerListens(number, count, address, 1))
        if not is_first:
            self._world.call_later(self._world.rng.uniform(0.0, COPY_S), self._copy, address)

    def _copy(self, address: str) -> None:
        """Give a process all rows; worker after worker sees that an heir has them."""
        process = self._processes[address]
        process.has_rows = process.is_alive
        for host in self._world.hosts.values():
            for worker in list(host.processes.values()):
                self._world.call_later(self._world.rng.uniform(0.0, 0.5), self.inform, worker)

    def _end_process(self, address: str) -> None:
        if address in self._processes:
            self._processes[address].is_alive = False

    # ------------------------------------------------------------ workers

    def inform(self, worker: Any) -> None:
        """Let a worker see which heirs have all rows, as the newest book names them."""
        heirs = sorted(each.address for each in self._book if each.heir and self._is_whole(each))
        if not (worker.alive and heirs and isinstance(worker, ServerUser)):
            return
        status = worker.machine.snapshot()
        if status.stage is Stage.READY and status.heirs != tuple(heirs):
            worker.feed(HeirsSeen(tuple(heirs)))

    def _is_whole(self, place: ServerPlace) -> bool:
        process = self._processes.get(place.address)
        return process is not None and process.is_alive and process.has_rows

    # ------------------------------------------------------------ checks

    def record_report(self, report: AgentReport) -> None:
        """Record that the coordinator hears of a node."""
        if not self._world.options.servers:
            return
        self._heard[report.agent] = self._world.now, self._world.now + report.leaves_in_s
        for status in report.workers:
            key = status.worker, status.incarnation
            if self._steps.setdefault(key, status.committed) != status.committed:
                self._steps[key], self._moved_at = status.committed, self._world.now

    def check_record(self, record: JobRecord) -> None:
        """Check the moves of servers that the coordinator has decided."""
        before = {each.number: each for each in self._book if not each.heir}
        for place in record.servers:
            old = before.get(place.number)
            if place.heir or old is None or old.agent == place.agent:
                continue
            if self._is_whole(place):
                self.moves += 1
            elif self._is_whole(old) and self._could_wait(old.agent):
                raise Violation(f"server {place.number} moves to {place.agent}, without its rows")
        self._book = record.servers

    def _could_wait(self, agent: AgentId) -> bool:
        """Return whether the coordinator knows that a node is there for a while yet."""
        heard_at, leaves_at = self._heard[agent]
        now, options = self._world.now, self._world.options
        if now >= self._moved_at + options.abandon_s / 2:
            return False  # without workers that train an heir gets no rows
        leaves_at -= LEAVE_RESERVE_S + options.suspect_s
        return now < heard_at + options.suspect_s / 2 and now < leaves_at

    def check_quit(self, node: ServerNode, is_over: bool) -> None:
        """Check that an agent that leaves before it must takes no rows with it that have an heir.

        `is_over`: the job is, or another one is in its place.
        """
        book = self._told[node.name].servers if node.name in self._told else ()
        moving = {each.number for each in book if each.heir}
        machine = node.machine
        must = is_over or machine is None or machine.snapshot().report.leaves_in_s <= 0
        for each in book:
            mine = each.agent == node.name and not each.heir and each.number in moving
            if mine and self._is_whole(each) and not must:
                raise Violation(f"{node.name} leaves, and its server {each.number} has an heir")
        self.end(node)


def _address(node: ServerNode, number: int, count: int) -> str:
    return f"{node.name}.{node.incarnation}:{number}.{count}"
