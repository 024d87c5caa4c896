"""Declares the parts of the simulated world for each other, so that none imports its importer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from holdfast.engine.core.ground.events import WorkerEvent
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.lab.sim.arithmetic import Key, Parts, Spoiling
from holdfast.lab.sim.groups import Group, What
from holdfast.lab.sim.run_options import Options


class Clock(Protocol):
    """Is a world's clock, and its one source of chance."""

    @property
    def now(self) -> float: ...

    @property
    def rng(self) -> Random: ...

    @property
    def options(self) -> Options: ...

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...

    def delay(self, typical_s: float) -> float: ...


class Memory(Protocol):
    """Keeps what a node's workers put there, for when they are lost."""

    def keep_sum(
        self, view: View, worker: WorkerId, step: int, total: int | None, place: int = 0
    ) -> None: ...

    def keep_state(
        self,
        view: View,
        worker: WorkerId,
        step: int,
        copy: tuple[int | None, int | None],
        place: int = 0,
    ) -> None: ...

    def mark(self, view: int, worker: WorkerId, step: int) -> None: ...

    def forget(self, view: int, step: int) -> None: ...


class ProcessWatch(Protocol):
    """Watches processes that stand still."""

    def watch(self, process: Any) -> None: ...


class ProcessNode(Protocol):
    """Is the node of a process: it has a clock and a memory, and may have been drained."""

    drained: bool

    @property
    def memory(self) -> Memory: ...

    def clock(self) -> float: ...

    def world_time(self, clock: float) -> float: ...


class SeenSums(Protocol):
    """Shows the checkers the parts of a process's newest sum."""

    parts: Parts
    view: View | None
    summed_in: View | None
    wrongly: tuple[int, ...]
    looked: tuple[int, int]

    def awaited_rank(self, step: int) -> int: ...


class Fed(Protocol):
    """Receives states and steps for a process that follows."""

    is_wrong: bool

    def receive(self, message: Any) -> None: ...

    def copied_fingerprint(self, step: int) -> int: ...


class AllNodes(Protocol):
    """Reaches the memory of all nodes over which a worker is spread."""

    @property
    def is_whole(self) -> bool: ...

    @property
    def agents(self) -> list[AgentId]: ...

    def visit_memories(self, call: Callable[[Memory, AgentId, int], None]) -> None: ...


class Actor(Protocol):
    """Is one worker process, as all but itself see it."""

    worker: WorkerId
    key: Key
    agent: AgentId
    alive: bool
    stopped: bool
    silent: bool
    paused: bool
    froze: bool
    stuck: bool
    ailing: bool
    at_rest: bool
    whole: bool
    state: int | None
    step: int
    open_step: int
    tokens: dict[int, int]
    copies: dict[int, int]
    compute_us: int
    total: int | None
    total_step: int
    last_step_of: int
    cut_through: int
    is_connected: bool
    group: Group | None

    @property
    def until(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def machine(self) -> WorkerMachine: ...

    @property
    def host(self) -> ProcessNode: ...

    @property
    def spread(self) -> AllNodes: ...

    @property
    def spoiling(self) -> Spoiling: ...

    @property
    def feeds(self) -> Fed: ...

    @property
    def exchanges(self) -> SeenSums: ...

    def post(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...

    def deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None: ...

    def feed(self, event: WorkerEvent) -> None: ...

    def open_group(self, number: int) -> Group | None: ...

    def handle_connection(self, number: int) -> None: ...

    def receive(self, what: What) -> None: ...


class ProcessWorld(Clock, Protocol):
    """Is a world with processes in it."""

    @property
    def processes(self) -> Mapping[Key, Actor]: ...

    def live_processes(self) -> Sequence[Actor]: ...
