"""Declares the parts of the simulated world for each other, so that none imports its importer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from holdfast.engine.core.ground.events import WorkerEvent
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.lab.sim.arithmetic import INITIAL_STATE, Key, Parts, Spoiling
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


@dataclass(slots=True)
class ScriptWork:
    """Keeps the state that a script holds, and the results of its step."""

    #: None while it is written.
    state: int | None = INITIAL_STATE
    #: The steps that were applied to it.
    step: int = 0
    loop: int = 0
    #: The step that the script computes.
    open_step: int = -1
    #: All of the state is looked at in that step.
    whole: bool = False
    #: The script is held between two steps.
    at_rest: bool = False
    #: The results of the tasks that its worker hosts.
    tokens: dict[int, int] = field(default_factory=dict)
    #: The results of speculative tasks.
    copies: dict[int, int] = field(default_factory=dict)
    #: The compute time of the step's tasks so far.
    compute_us: int = 0
    total: int | None = None
    total_step: int = -1


@dataclass(slots=True)
class Ailments:
    """Keeps the faults that a process has had, and has."""

    #: It was silent at some time.
    silenced: bool = False
    #: It was stopped by a fault at some time.
    froze: bool = False
    #: The main thread never comes back.
    stuck: bool = False
    #: Stuck or very slow at some time: it may count as hung.
    ailing: bool = False
    slowness: float = 1.0


@dataclass(slots=True)
class Tie:
    """Keeps what ties a process to the other members of its view."""

    group: Group | None = None
    is_connected: bool = False
    #: The view whose vote announced a planned change.
    last_step_of: int = -1
    #: Messages of views up to this one are lost.
    cut_through: int = -1


class ScriptAtWork(Protocol):
    """Is what a script does just now."""

    @property
    def is_busy(self) -> bool: ...

    @property
    def until(self) -> int: ...

    @property
    def can_wait(self) -> bool: ...


class Actor(Protocol):
    """Is one worker process, as all but itself see it."""

    key: Key
    alive: bool
    stopped: bool
    silent: bool
    paused: bool

    health: Ailments
    tie: Tie

    @property
    def worker(self) -> WorkerId: ...

    @property
    def agent(self) -> AgentId: ...

    @property
    def work(self) -> ScriptWork: ...

    @property
    def script(self) -> ScriptAtWork: ...

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
