"""Runs servers of tables on simulated nodes, and checks where the coordinator has them.

It knows which processes have all rows: the first one of each server, and later ones once they have
copied the rows from a process with all rows. If there is none, the job goes back, and a new process
has all rows by that. So no move that was planned may leave the last process with rows behind. When
the number of servers changes, all copy rows again, and former servers may only be let go once each
has done so, and every member of the view knows where to look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

from holdfast.engine.core.directives import AgentReport, Directive
from holdfast.engine.core.ground.events import HeirsSeen
from holdfast.engine.core.hosted_service import ServerLayout, ServerPlace
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership.decision_loop import SKIPPED
from holdfast.engine.core.membership.formation import LEAVE_RESERVE_S
from holdfast.engine.core.membership.server_host import (
    BookArrived,
    EndServer,
    HostEvent,
    ServerEnded,
    ServerHost,
    ServerListens,
    StartServer,
    TellServers,
)
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.worker_status import Stage
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.wrong_bits import Violation

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
    #: Number of the last layout whose new rows the process has copied.
    layout: int = -1
    is_alive: bool = True
    ended_at: float = math.inf


class ServerHosts:
    """Runs the servers of all nodes. `moves`: how many moved as planned.

    `scales`: times that another number of servers held all rows.
    """

    def __init__(self, world: ServerWorld) -> None:
        self.moves = self.scales = 0
        self._world = world
        self._layout: ServerLayout | None = None  # as it is recorded
        self._heard_layout: ServerLayout | None = None  # the newest word, to this coordinator
        self._known: dict[Any, ServerLayout] = {}  # the newest that each worker's process knows
        self._hosts: dict[AgentId, ServerHost] = {}
        self._processes: dict[str, _Process] = {}  # by address
        # The newest directive that each node has received.
        self._told: dict[AgentId, Directive] = {}
        self._heard: dict[AgentId, tuple[float, float]] = {}  # when, and when the node is gone
        self._newest: dict[AgentId, tuple[int, int]] = {}  # reports: incarnation and number
        # The last time at which the coordinator learned of a worker's next step.
        self._moved_at = 0.0
        self._steps: dict[tuple[int, int], int] = {}  # the newest word of each process
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
        for address, process in self._processes.items():
            if process.node == node.name and process.is_alive:
                self._end_process(address)

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
        if not is_first or (self._layout and self._layout.is_changing):
            self._copy_later(address)

    def _copy_later(self, address: str) -> None:
        number = self._layout.number if self._layout is not None else 0
        self._world.call_later(self._world.rng.uniform(0.0, COPY_S), self._copy, address, number)

    def _copy(self, address: str, layout: int) -> None:
        """Give a process all rows; worker after worker sees that it has them."""
        process = self._processes[address]
        if not process.is_alive:
            return
        process.has_rows, process.layout = True, max(process.layout, layout)
        for host in self._world.hosts.values():
            for worker in list(host.processes.values()):
                self._world.call_later(self._world.rng.uniform(0.0, 0.5), self.inform, worker)

    def _end_process(self, address: str) -> None:
        if address in self._processes:
            process = self._processes[address]
            process.is_alive, process.ended_at = False, self._world.now

    # ------------------------------------------------------------ workers

    def inform(self, worker: Any, layout: ServerLayout | None = None) -> None:
        """Inform a worker of the new processes in the newest book that have all rows.

        `layout`: the layout that it receives now.
        """
        if not (worker.alive and isinstance(worker, ServerUser)):
            return
        known = self._known.get(worker)
        if layout is not None and (known is None or layout.number > known.number):
            self._known[worker] = known = layout
        if known is None:
            return
        addresses = sorted(
            each.address
            for each in self._book
            if (each.heir or known.is_changing)
            and self._is_whole(each)
            and self._processes[each.address].layout >= known.number
        )
        status = worker.machine.snapshot()
        if status.stage is Stage.READY and (status.heirs, status.layout) != (
            tuple(addresses),
            known,
        ):
            worker.feed(HeirsSeen(tuple(addresses), known))

    def _is_whole(self, place: ServerPlace) -> bool:
        process = self._processes.get(place.address)
        return process is not None and process.is_alive and process.has_rows

    def _was_whole(self, place: ServerPlace) -> bool:
        """Return whether a process may have had all rows in its last report to the coordinator."""
        process, options = self._processes.get(place.address), self._world.options
        if process is None or not process.has_rows:
            return False
        return self._world.now < process.ended_at + options.suspect_s + options.lease_s

    # ------------------------------------------------------------ checks

    def record_coordinator_start(self) -> None:
        """Record that a coordinator starts, without any report yet."""
        self._heard_layout = None

    def record_report(self, report: AgentReport) -> None:
        """Record that the coordinator receives a node's report."""
        order = report.incarnation, report.seq
        if not self._world.options.servers or order <= self._newest.get(report.agent, (0, 0)):
            return
        self._newest[report.agent] = order
        now, earlier = self._world.now, self._heard.get(report.agent, (0.0, math.inf))[1]
        # The earliest notice of a node's end counts.
        leaves_at = min(earlier, now + report.leaves_in_s) if report.draining else math.inf
        self._heard[report.agent] = now, leaves_at
        for status in report.workers:
            heard = self._heard_layout
            if status.layout and (heard is None or status.layout.number > heard.number):
                self._heard_layout = status.layout
            key = status.worker, status.incarnation
            if self._steps.setdefault(key, status.committed) != status.committed:
                self._steps[key], self._moved_at = status.committed, self._world.now

    def check_record(self, record: JobRecord) -> None:
        """Check the moves of servers that the coordinator has decided."""
        before = {each.number: each for each in self._book if not each.heir}
        layout = self._layout.number if self._layout is not None else 0
        for place in record.servers:
            old = before.get(place.number)
            if place.heir or old is None or old.agent == place.agent:
                continue
            if self._was_whole(place) and self._processes[place.address].layout >= layout:
                self.moves += 1
            elif self._is_whole(old) and self._could_wait(old.agent):
                raise Violation(f"server {place.number} moves to {place.agent}, without its rows")
        self._book = record.servers
        if record.layout is not None and record.layout != self._layout:
            self._check_layout(record.layout, record)

    def _check_layout(self, layout: ServerLayout, record: JobRecord) -> None:
        """Check another layout of rows that the coordinator has decided."""
        old, self._layout = self._layout, layout
        if old is None:
            return
        if layout.number <= old.number and not record.forgotten:
            raise Violation(f"layout {layout.number} follows layout {old.number}")
        is_guess = layout.number > 0 and layout.number % SKIPPED == 0
        if is_guess and self._heard_layout not in (None, layout):
            raise Violation(f"{self._heard_layout} was heard, and is forgotten")
        if layout.count != old.count and not record.forgotten:
            self._check_scaled(old, layout, record)
        for address, process in self._processes.items():
            if process.is_alive:
                self._copy_later(address)

    def _check_scaled(self, old: ServerLayout, new: ServerLayout, record: JobRecord) -> None:
        """Check that former servers are needed no more, because the new ones have all rows."""
        if new.count != old.goal or new.number != old.number + 1:
            raise Violation(f"tables come to {new.count} servers, where {old.goal} copy them")
        self.scales += 1
        for place in record.servers:
            process = self._processes.get(place.address)
            if not place.heir and (process is None or process.layout < old.number):
                raise Violation(f"server {place.number} is used before it has all rows")
        members = record.view.members if record.view is not None else ()
        for worker, known in self._known.items():
            is_member = any(worker.key == (m.worker, m.incarnation) for m in members)
            if is_member and worker.alive and known.number < old.number:
                raise Violation(f"worker {worker.key[0]} does not know of layout {old.number}")

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
