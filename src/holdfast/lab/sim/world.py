"""Simulates the world: one heap of events, one source of chance, and everything that lives in it.

The same options give the same trace, whatever the hash seed: nothing here iterates over a set or
reads a clock.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from holdfast.engine.core.job_spec import CoordinatorPolicy
from holdfast.engine.core.membership.agent import AgentMachine, AgentPolicy
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.policies import LeasePolicy, RestartPolicy
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.checkers import Truth
from holdfast.lab.sim.data_network import DataNetwork
from holdfast.lab.sim.fault_injection import Faults
from holdfast.lab.sim.hosts import AgentHost, CoordinatorHost
from holdfast.lab.sim.run_options import LONG, Options
from holdfast.lab.sim.workers import Process
from holdfast.lab.sim.wrong_bits import Violation

LOOK_S = 1.0
STORY_MAX = 40
EVENTS_MAX = 150_000  # for a job on a few nodes, which takes some thousands, and rarely 100,000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Names the classes of the machines that run; tests put faulty ones here."""

    coordinator: type[CoordinatorMachine] = CoordinatorMachine
    agent: type[AgentMachine] = AgentMachine
    worker: type[WorkerMachine] = WorkerMachine


class Timeline:
    """Keeps future events in order. Worlds that share a timeline live at the same time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def call_later(self, delay_s: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Have something happen later."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, call, args))

    def step(self, deadline: float) -> bool:
        """Let the next thing happen; return whether there was one before the deadline."""
        if not self._heap or self._heap[0][0] > deadline:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True


class World:
    """Runs one job; see `swarm.run_seed` for how it is used.

    `nodes`: the prefix of its nodes' names; `job`: its own name. Both must differ between worlds
    that share a timeline.
    """

    def __init__(
        self,
        options: Options,
        machines: Machines,
        listener: Callable[[str], None] | None,
        timeline: Timeline | None = None,
        nodes: str = "agent",
        job: str = "job",
    ) -> None:
        self.timeline = timeline or Timeline()
        self.nodes = nodes
        self.job = job
        self.options = options
        self.machines = machines
        self.listener = listener
        self.rng = Random(options.seed)
        self.events = 0
        self.digest = 0
        self.truth = Truth(options)
        self.truth.reaches = self.reaches
        self.store_silent = False
        self.data = DataNetwork(self)
        self.faults = Faults(self)
        self.coordinator = CoordinatorHost(self)
        self.hosts: dict[AgentId, AgentHost] = {}
        self.processes: dict[Key, Process] = {}
        self.cut: dict[tuple[str, bool], int] = {}  # (agent, towards the coordinator)
        self.count = {"spawns": 0, "kills": 0}
        self.story: deque[tuple[float, object, object, object]] = deque(maxlen=STORY_MAX)
        lease = LeasePolicy(
            lease_s=options.lease_s,
            margin_s=options.lease_margin_s,
            suspect_s=options.suspect_s,
            abandon_s=options.abandon_s,
        )
        self.agent_policy = AgentPolicy(
            heartbeat_s=options.heartbeat_s, lease=lease, spares=options.spares
        )
        self.coordinator_policy = CoordinatorPolicy(
            virtual_ranks=options.vranks,
            nodes_min=options.nodes_min,
            nodes_max=options.nodes_max,
            workers_min=options.workers_min,
            lease=lease,
            settle_s=options.settle_s,
            patience_s=2.0,
            grace_s=options.grace_s,
            hang_s=options.hang_s,
            speculation=options.speculation,
            retreats_max=1000,
            keeps=options.save_every > 0,
            spares=options.spares,
            hot_spares=options.hot_spares,
            feeds=options.feeds,
            redundancy=options.redundancy,
            procs=options.procs,
            spread=options.spread,
            servers=options.servers,
            replicated=not options.shard_optimizer,
            restart=RestartPolicy(
                losses_max=options.losses_max,
                backoff_s=0.1,
                backoff_max_s=2.0,
                quarantine_s=1.0,
                wrong_s=1.0,
                wrong_max_s=8.0,
                quarantine_max_s=8.0,
                probation_s=5.0,
            ),
        )

    # ------------------------------------------------------------ time

    @property
    def now(self) -> float:
        """Return the time, in seconds since the first world of its timeline began."""
        return self.timeline.now

    def run(self) -> None:
        """Run the job from start to end; raises whatever a checker or a machine finds."""
        self.begin()
        deadline = self.options.finish_by_s
        while not self.is_over and self.timeline.step(deadline):
            self.count_event()
        if not self.is_over:
            raise self.describe_delay()

    def begin(self) -> None:
        """Have the job begin now."""
        self.truth.start()
        self._start()
        self.call_later(LOOK_S, self._look)

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, and nothing of it runs: no worker and no agent."""
        if self.coordinator.outcome is None or self.truth.live:
            return False
        return all(host.machine is None for host in self.hosts.values())

    def count_event(self) -> None:
        """Count an event. Violation once there are more than any job needs."""
        self.events += 1
        if self.events > EVENTS_MAX * max(1, self.options.agents // 10):
            raise Violation(f"no end after {self.events} events")

    def describe_delay(self) -> Violation:
        """Return the violation of a job that has not ended in time."""
        waited_s = self.options.finish_by_s - self.options.faults_end_s
        return Violation(f"not finished {waited_s:.0f} s after the faults")

    def _look(self) -> None:
        """Have the checkers look at the job as it is, whatever happens in it."""
        if self.coordinator.outcome is None:
            self.truth.look(self.now, self.faults.disturbed_until)
            self.call_later(LOOK_S, self._look)

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.timeline.call_later(delay_s, call, args)

    def delay(self, typical_s: float) -> float:
        """Mostly about `typical_s`, now and then many times that, up to `DELAY_MAX` times."""
        rng = self.rng
        value = typical_s * (0.5 + rng.random())
        if rng.random() >= 0.02:
            return value
        self.truth.endings.record_delay(self.now, value * LONG)
        return value * LONG

    def _start(self) -> None:
        options = self.options
        self.faults.start()
        for i in range(options.agents):
            name = AgentId(f"{self.nodes}{i}")
            self.hosts[name] = AgentHost(self, name)
            late = i >= options.agents - options.agents_late
            span_s = options.faults_end_s if late else 0.5
            self.call_later(self.rng.uniform(0.0, span_s), self.hosts[name].start)
        self.call_later(self.rng.uniform(0.0, 0.5), self.coordinator.start)
        if options.stop_s:
            self.call_later(options.stop_s, self.coordinator.stop)
        if options.stop_again_s:
            self.call_later(options.stop_again_s, self.coordinator.stop_at_once)

    # ------------------------------------------------------------ the control network

    def transmit(self, agent: str, up: bool, hear: Callable[[Any], None], message: object) -> None:
        """Agent to coordinator (`up`) or back: may be lost, repeated, late or out of order."""
        if self.cut.get((agent, up)):
            return
        options, lossy = self.options, self.faults.active and self.options.loss > 0
        if lossy and self.rng.random() < options.loss:
            return
        self.call_later(self.delay(options.control_s), self._arrive, agent, up, hear, message)
        if lossy and self.rng.random() < options.duplicate:
            self.call_later(
                self.delay(options.control_s * 20), self._arrive, agent, up, hear, message
            )

    def _arrive(self, agent: str, up: bool, hear: Callable[[Any], None], message: object) -> None:
        if not self.cut.get((agent, up)):
            hear(message)

    def reaches(self, agent: AgentId) -> bool:
        """Return whether a node is up, and neither frozen nor cut off."""
        host = self.hosts[agent]
        cut = self.cut.get((agent, True)) or self.cut.get((agent, False))
        return host.machine is not None and not host.frozen and not cut

    # ------------------------------------------------------------ processes

    def first_process(self, key: Key) -> Process | None:
        """Return the process of an incarnation on its worker's first node."""
        return self.processes.get(key)

    def are_apart(self, a: AgentId, b: AgentId) -> bool:
        """Return whether two nodes' data networks are cut from each other."""
        return self.data.are_apart(a, b)

    def is_up(self, agent: AgentId) -> bool:
        """Return whether a node has not crashed."""
        return self.hosts[agent].machine is not None

    def record_start(self, process: Process) -> None:
        self.count["spawns"] += 1
        self.truth.record_start(process)
        self.processes[process.key] = process

    def record_end(self, process: Process) -> None:
        self.truth.record_end(process)
        self.truth.proofs.record_end(process.key, self.now)

    def live_processes(self) -> list[Process]:
        return [self.processes[key] for key in sorted(self.truth.live)]

    # ------------------------------------------------------------ the story

    def note(self, who: object, event: object, effects: list[Any]) -> None:
        """Remember one event of a machine; its digest makes two runs comparable."""
        self.story.append((self.now, who, event, effects))
        text = f"{self.now:.9f}{type(event).__name__}{len(effects)}"
        self.digest = zlib.crc32(text.encode(), self.digest)
        if self.listener is not None:
            self.listener(tell(self.now, who, event, effects))

    def mark(self, text: str) -> None:
        self.story.append((self.now, None, text, ()))
        if self.listener is not None:
            self.listener(tell(self.now, None, text, ()))

    def recent(self) -> list[str]:
        return [tell(*entry) for entry in self.story]


def tell(now: float, who: object, event: object, effects: Any) -> str:
    """Write one line of the story, and one more for each effect."""
    match who:
        case Process():
            name = f"worker {who.key[0]}.{who.key[1]}"
        case AgentHost():
            name = f"{who.name}.{who.incarnation}"
        case CoordinatorHost():
            name = f"coordinator.{who.term}"
        case _:
            return f"{now:10.4f}  *** {event}"
    lines = [f"{now:10.4f}  {name:14} {_shorten(event)}"]
    lines += [f"{'':28}-> {_shorten(effect)}" for effect in effects]
    return "\n".join(lines)


def _shorten(value: object) -> str:
    """Write a dataclass without the noise: without names of types and default values."""
    if isinstance(value, tuple):
        return "(" + ", ".join(_shorten(v) for v in value) + ")"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None:
        return str(value)
    shown = [
        f"{name}={_shorten(getattr(value, name))}"
        for name, field in fields.items()
        if getattr(value, name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
