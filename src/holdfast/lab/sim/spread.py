"""Simulates a process that can stop, freeze and continue, and workers of several such processes.

A process can be stopped (it handles no event until it is resumed), silent (the same, but its
counters move), or paused by its agent; calls to it wait in the meantime.

What a worker does stands for shard 0. Each further shard does the same in the same order, and is
late by a time of its own; now and then its connections break where those of shard 0 do not. The
processes on further nodes live, freeze and end each by itself; any of them takes the rest along,
once they learn of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import WorkerEvent
from holdfast.engine.core.step.shards import FollowerProofs, ShardEvents
from holdfast.engine.core.types import AgentId, Incarnation, Tick, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.membership_checks import Proofs
from holdfast.lab.sim.seams import Ailments, Clock, Memory, ProcessWatch

_OF_THE_WORKER = (ev.Directed, Tick, ev.LinkLost, ev.StillAwaited)  # only shard 0 has these
BREAKS = 0.002  # chance for each thing that a shard does together with other workers
RETRY_S = 0.2  # after which a network that is cut is tried again

Later = Callable[..., None]  # (shard, seconds, call, arguments)


class OtherShards:
    """Gathers the events of one worker's processes; `feed` hands the joint ones to the machine."""

    def __init__(self, count: int, lag_s: float, rng: Random, feed: Callable[[WorkerEvent], None]):
        self._count = count
        self._lag_s = lag_s
        self._rng = rng
        self._feed = feed
        self._events = ShardEvents(count)
        self.behind = 0  # things that shard 0 has done and another one has not
        self._free = [0.0] * count  # when a shard has done all its work so far

    def follow_first(
        self, event: WorkerEvent, now: float, later: Later, *, may_break: bool
    ) -> Sequence[WorkerEvent]:
        """Return the events for the machine after one of shard 0; the other shards follow."""
        if self._count == 1 or isinstance(event, _OF_THE_WORKER):
            return [event]
        for shard in range(1, self._count):
            copy = event
            view: ViewNumber | None = getattr(event, "view", None)
            if view is not None and may_break and self._rng.random() < BREAKS:
                copy = ev.GroupBroken(view, f"shard {shard} has lost a connection")
            lag_s = self._rng.expovariate(1.0) * self._lag_s
            self._free[shard] = max(self._free[shard], now + lag_s)
            self.behind += 1
            later(shard, self._free[shard] - now, self._follow, shard, copy)
        return self._events.hear(0, event)

    def lag_s(self, now: float) -> float:
        """Return the seconds until the slowest shard is level with shard 0."""
        return max(self._free) - now

    def enter(self, view: ViewNumber) -> None:
        """Begin a view: what only some have done in earlier ones is not waited for."""
        self._events.begin(view)

    def _follow(self, shard: int, event: WorkerEvent) -> None:
        self.behind -= 1
        for told in self._events.hear(shard, event):
            self._feed(told)


class Running:
    """Simulates that a process runs, or does not."""

    def __init__(self, clock: Clock, key: Key) -> None:
        self.key = key
        self._clock = clock
        self.alive = True
        self.stopped = False  # by a signal: the kernel shows state T
        self.silent = False  # in foreign code that holds the interpreter lock
        self.paused = False  # by its agent
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    @property
    def label(self) -> str:
        return f"worker {self.key[0]}.{self.key[1]}"

    def post(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call in this process, if it still lives then."""
        self._clock.call_later(delay_s, self.deliver, call, args)

    def deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do something now, or once the process runs again."""
        if not self.alive:
            return
        if not self.is_running:
            self.backlog.append((call, args))
            return
        call(*args)

    @property
    def is_running(self) -> bool:
        """Return whether the process is neither stopped nor silent nor paused."""
        return not (self.stopped or self.silent or self.paused)

    def die(self) -> None:
        """End the process at this very moment."""
        self.alive = False

    def resume(self) -> None:
        """Resume, no longer frozen: handle what piled up at once, unless its agent paused it."""
        self.stopped = self.silent = False
        self.wake()

    def wake(self) -> None:
        """Handle the calls that have piled up."""
        while self.backlog and self.alive and self.is_running:
            call, args = self.backlog.popleft()
            call(*args)


class FirstProcess(Protocol):
    """Is a worker's process on its first node."""

    key: Key
    alive: bool
    health: Ailments

    @property
    def agent(self) -> AgentId: ...

    @property
    def spread(self) -> Spread: ...

    def post(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...

    def deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None: ...

    def run_script(self) -> None: ...

    def end(self, code: int, detail: str = "") -> None: ...


class SpreadNode(Protocol):
    """Is a node on which some of a worker's processes run."""

    @property
    def name(self) -> AgentId: ...

    @property
    def memory(self) -> Memory: ...

    def clock(self) -> float: ...

    def world_time(self, clock: float) -> float: ...

    def handle_status(self, process: Any, status: WorkerStatus) -> None: ...

    def handle_process_end(
        self, process: Any, code: int, detail: str, reported: bool = False
    ) -> None: ...

    @property
    def sampler(self) -> ProcessWatch: ...


class ProofChecker(Protocol):
    """Checks what processes take for proved."""

    @property
    def proofs(self) -> Proofs: ...


class SpreadWorld(Clock, Protocol):
    """Is the world around them."""

    @property
    def truth(self) -> ProofChecker: ...

    def first_process(self, key: Key) -> FirstProcess | None: ...

    def are_apart(self, a: AgentId, b: AgentId) -> bool: ...

    def is_up(self, agent: AgentId) -> bool: ...


class Further(Running):
    """Simulates the processes of a worker on one of its further nodes, of number `place`."""

    def __init__(
        self,
        world: SpreadWorld,
        host: SpreadNode,
        worker: WorkerId,
        incarnation: Incarnation,
        place: int,
    ) -> None:
        super().__init__(world, (int(worker), int(incarnation)))
        self.world = world
        self.host = host
        self.agent = host.name
        self.worker = worker
        self.incarnation = incarnation
        self.place = place
        self._proofs = FollowerProofs()
        self._said = 0

    def start(self) -> None:
        """Look for the process on the first node."""
        self.post(self.world.delay(self.world.options.boot_s / 4), self._meet)

    def handle_directive(self, directive: WorkerDirective) -> None:
        """Take in no message: directives are for the process on the first node."""

    def apply_commit(self, view: int, commit: ef.Commit) -> None:
        """Apply a step, and report to the agent if that shows that all members have acted."""
        proved_at = self._proofs.record_commit(self.host.clock(), voted=commit.voted)
        if proved_at is None:
            return
        world = self.world
        world.truth.proofs.check_proof(self.key, view, commit.step, self.host.world_time(proved_at))
        self._said += 1
        status = WorkerStatus(
            worker=self.worker,
            incarnation=self.incarnation,
            seq=self._said,
            stage=Stage.READY,
            proved_at=proved_at,
        )
        world.call_later(
            world.delay(world.options.channel_s), self.host.handle_status, self, status
        )

    def end(self, code: int, detail: str = "", *, reported: bool = False) -> None:
        """End here and now; its agent and the other processes learn of it a little later."""
        if not self.alive:
            return
        self.alive = False
        self.host.handle_process_end(self, code, detail, reported)
        first = self.world.first_process(self.key)
        if first is not None:
            first.spread.handle_loss(self)

    def _meet(self) -> None:
        first = self.world.first_process(self.key)
        if first is None or not first.alive or self.world.are_apart(first.agent, self.agent):
            self.end(-9, "it does not find its worker")
        else:
            first.spread.meet(self)


class Spread:
    """Keeps together the processes on all nodes of a worker; `first`: the one on the first node.

    `hand` hands an event of all shards to the machine.
    """

    def __init__(
        self,
        world: SpreadWorld,
        first: FirstProcess,
        memory: Memory,
        hand: Callable[[WorkerEvent], None],
    ) -> None:
        self._world = world
        self._first = first
        self._memory = memory
        self._nodes, self._procs = world.options.spread, world.options.procs
        self.shards = OtherShards(self._procs, world.options.shard_lag_s, world.rng, hand)
        self.further: dict[int, Further] = {}  # by place
        self._held: dict[int, deque[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    @property
    def is_whole(self) -> bool:
        """Return whether processes live on all nodes."""
        return len(self.further) == self._nodes - 1 and all(
            each.alive for each in self.further.values()
        )

    @property
    def agents(self) -> list[AgentId]:
        """Return all of its nodes."""
        return [self._first.agent, *(each.agent for each in self.further.values())]

    def meet(self, further: Further) -> None:
        """Start the script, once processes of all nodes are there; none may come later."""
        if len(self.further) == self._nodes - 1:
            further.end(-9, "its worker does not listen any more")
            return
        self.further[further.place] = further
        if len(self.further) == self._nodes - 1:
            self._first.run_script()

    def handle_loss(self, further: Further) -> None:
        """End the worker whose connection has ended, unless the network lost that with the node."""
        if self.further.get(further.place) is further and self._is_heard(further.agent):
            why = f"its process on {further.agent} is gone"
            self._first.post(self._world.delay(0.005), self._first.end, -9, why)

    def end_others(self, *, well: bool) -> None:
        """End the processes on further nodes, since that on the first node has ended."""
        for each in self.further.values():
            if self._is_heard(each.agent):
                how, why = 0 if well else -9, "its worker has ended"
                each.post(self._world.delay(0.005), partial(each.end, how, why, reported=well))

    def call_shard_later(
        self, shard: int, delay_s: float, call: Callable[..., None], *args: Any
    ) -> None:
        """Schedule a call in a shard's process, which then reports to the first node."""
        place = shard * self._nodes // self._procs
        if not place:
            self._first.post(delay_s, call, *args)
        else:
            self._world.call_later(delay_s, self._go, place, self._first.deliver, (call, args))

    def apply_commit(self, view: int, commit: ef.Commit) -> None:
        """Order the processes on further nodes to apply a step, after all earlier orders."""
        for place, each in self.further.items():
            self._go(place, each.apply_commit, (view, commit))

    def visit_memories(self, call: Callable[[Memory, AgentId, int], None]) -> None:
        """Do something with the memory of each of the worker's nodes."""
        call(self._memory, self._first.agent, 0)
        for place, each in self.further.items():
            self._go(place, call, (each.host.memory, each.agent, place))

    # ------------------------------------------------------------ the network between them

    def _go(self, place: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do something on a further node, in order; what the network does not carry waits."""
        held = self._held.setdefault(place, deque())
        held.append((call, args))
        if len(held) == 1:
            self._drain(place)

    def _drain(self, place: int) -> None:
        further, held = self.further[place], self._held[place]
        if held and self._world.are_apart(self._first.agent, further.agent):
            self._first.health.ailing = True
            self._world.call_later(RETRY_S, self._drain, place)
            return
        while held:
            call, args = held[0]
            further.deliver(call, args)
            held.popleft()

    def _is_heard(self, agent: AgentId) -> bool:
        """Return whether the end of a connection between two nodes is noticed."""
        world, ours = self._world, self._first.agent
        if world.are_apart(ours, agent):
            return False
        lost = not world.is_up(ours) or not world.is_up(agent)
        return not lost or world.rng.random() >= world.options.unheard_break
