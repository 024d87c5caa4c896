"""Simulates the world: one heap of events, one source of chance, and everything that lives in it.

The same options give the same trace, whatever the hash seed: no code here iterates over a set or
reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from holdfast.engine.core.membership.agent import AgentMachine
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.checkers import Truth
from holdfast.lab.sim.data_network import DataNetwork
from holdfast.lab.sim.fault_injection import Faults
from holdfast.lab.sim.hosts import AgentHost, ControlNetwork, CoordinatorHost, Names
from holdfast.lab.sim.run_options import LONG, Options
from holdfast.lab.sim.timeline import Story, Timeline
from holdfast.lab.sim.workers import Process
from holdfast.lab.sim.wrong_bits import Violation

LOOK_S = 1.0
FIRST = Names(nodes="agent", job="job")
#: For a job on a few nodes, which takes some thousands of events, and rarely 100,000.
EVENTS_MAX = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Names the classes of the machines that run; tests put faulty ones here."""

    coordinator: type[CoordinatorMachine] = CoordinatorMachine
    agent: type[AgentMachine] = AgentMachine
    worker: type[WorkerMachine] = WorkerMachine


class World:
    """Runs one job, as `swarm.run_seed` does."""

    def __init__(
        self,
        options: Options,
        machines: Machines,
        listener: Callable[[str], None] | None,
        timeline: Timeline | None = None,
        names: Names = FIRST,
    ) -> None:
        self.timeline = timeline or Timeline()
        self.names = names
        self.options = options
        self.machines = machines
        self.rng = Random(options.seed)
        self.story = Story(self.timeline, listener)
        self.truth = Truth(options)
        self.truth.membership.reaches = self.reaches
        self.store_silent = False
        self.data = DataNetwork(self)
        self.faults = Faults(self)
        self.coordinator = CoordinatorHost(self)
        self.hosts: dict[AgentId, AgentHost] = {}
        self.processes: dict[Key, Process] = {}
        self.network = ControlNetwork(self)
        self.count = {"spawns": 0, "kills": 0}

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
        """Start the job now."""
        self.truth.start()
        self._start()
        self.call_later(LOOK_S, self._look)

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, and no process of it runs: no worker and no agent."""
        if self.coordinator.outcome is None or self.truth.processes.live:
            return False
        return all(host.machine is None for host in self.hosts.values())

    def count_event(self) -> None:
        """Count an event. Violation once there are more than any job needs."""
        self.story.events += 1
        if self.story.events > EVENTS_MAX * max(1, self.options.agents // 10):
            raise Violation(f"no end after {self.story.events} events")

    def describe_delay(self) -> Violation:
        """Return the violation of a job that has not ended in time."""
        waited_s = self.options.finish_by_s - self.options.faults_end_s
        return Violation(f"not finished {waited_s:.0f} s after the faults")

    def _look(self) -> None:
        """Check the job as it is, even if no event occurs."""
        if self.coordinator.outcome is None:
            self.truth.look(self.now, self.faults.disturbed_until)
            self.call_later(LOOK_S, self._look)

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.timeline.call_later(delay_s, call, args)

    def delay(self, typical_s: float) -> float:
        """Mostly about `typical_s`, now and then many times that, up to `DELAY_MAX` times."""
        rng = self.rng
        value = typical_s * (0.5 + rng.random())
        if rng.random() >= self.options.long_share:
            return value
        self.truth.endings.record_delay(self.now, value * LONG)
        return value * LONG

    def _start(self) -> None:
        options = self.options
        self.faults.start()
        for i in range(options.agents):
            name = AgentId(f"{self.names.nodes}{i}")
            self.hosts[name] = AgentHost(self, name)
            late = i >= options.agents - options.agents_late
            span_s = options.faults_end_s if late else 0.5
            self.call_later(self.rng.uniform(0.0, span_s), self.hosts[name].start)
        self.call_later(self.rng.uniform(0.0, 0.5), self.coordinator.start)
        if options.stop_s:
            self.call_later(options.stop_s, self.coordinator.stop)
        if options.stop_again_s:
            self.call_later(options.stop_again_s, self.coordinator.stop_at_once)

    # ------------------------------------------------------------ nodes and processes

    def reaches(self, agent: AgentId) -> bool:
        """Return whether a node is up, and neither frozen nor cut off."""
        host = self.hosts[agent]
        return host.machine is not None and not host.frozen and not self.network.is_cut(agent)

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
        return [self.processes[key] for key in sorted(self.truth.processes.live)]
