"""Simulates the coordinator's and the agents' processes, and the control network between them.

The network loses, repeats, delays and reorders; partitions cut either direction or both. A host
that crashes loses its memory; only the coordinator's journal is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.engine.core.directives import AgentReport, Directive
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership import coordinator as co
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership.liveness import ProcessSample
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.core.types import AgentId, Incarnation, Tick
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.endings import STOPPED
from holdfast.lab.sim.memories import HostMemory
from holdfast.lab.sim.server_hosts import ServerHosts
from holdfast.lab.sim.spread import Further
from holdfast.lab.sim.stored import WriterHost
from holdfast.lab.sim.workers import InsideStriker, Process, WorkerMaker, WorkerWorld

WORD_S = 0.5  # for an agent without a coordinator to look whether the job has left word


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names a world. `nodes` begins its nodes' names. Worlds with one timeline differ in both."""

    nodes: str
    job: str


class ProcessSpoiler(Protocol):
    """Makes the results of processes wrong."""

    def draw_lie_at_start(self, process: Process) -> int: ...


class HostStriker(InsideStriker, Protocol):
    """Ends coordinators between two effects, and loses their journals."""

    def strikes_coordinator(self) -> bool: ...

    def loses_journal(self) -> bool: ...

    @property
    def active(self) -> bool: ...

    @property
    def workers(self) -> ProcessSpoiler: ...


class HostMaker(WorkerMaker, Protocol):
    """Makes the machines of coordinators and agents, perhaps faulty ones."""

    @property
    def coordinator(self) -> type[co.CoordinatorMachine]: ...

    @property
    def agent(self) -> type[ag.AgentMachine]: ...


class HostWorld(WorkerWorld, Protocol):
    """Is the world around coordinator and agents."""

    count: dict[str, int]
    names: Names

    @property
    def machines(self) -> HostMaker: ...

    @property
    def faults(self) -> HostStriker: ...

    @property
    def coordinator(self) -> CoordinatorHost: ...

    @property
    def hosts(self) -> Mapping[AgentId, AgentHost]: ...

    @property
    def network(self) -> ControlNetwork: ...

    def record_start(self, process: Process) -> None: ...


class ControlNetwork:
    """Carries the messages between agents and the coordinator."""

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        # By agent and direction, True towards the coordinator: the number of cuts.
        self._cuts: dict[tuple[str, bool], int] = {}

    def cut(self, agent: str, up: bool) -> None:
        """Cut one direction; it is open again after as many calls of `heal`."""
        self._cuts[(agent, up)] = self._cuts.get((agent, up), 0) + 1

    def heal(self, agent: str, up: bool) -> None:
        """Take one cut back."""
        self._cuts[(agent, up)] -= 1

    def is_cut(self, agent: str) -> bool:
        """Return whether any direction is cut."""
        return bool(self._cuts.get((agent, True)) or self._cuts.get((agent, False)))

    def transmit(self, agent: str, up: bool, hear: Callable[[Any], None], message: object) -> None:
        """Agent to coordinator (`up`) or back: may be lost, repeated, late or out of order."""
        if self._cuts.get((agent, up)):
            return
        world, options = self._world, self._world.options
        lossy = world.faults.active and options.loss > 0
        if lossy and world.rng.random() < options.loss:
            return
        world.call_later(world.delay(options.control_s), self._arrive, agent, up, hear, message)
        if lossy and world.rng.random() < options.duplicate:
            world.call_later(
                world.delay(options.control_s * 20), self._arrive, agent, up, hear, message
            )

    def _arrive(self, agent: str, up: bool, hear: Callable[[Any], None], message: object) -> None:
        if not self._cuts.get((agent, up)):
            hear(message)


class CoordinatorHost:
    """Runs one CoordinatorMachine at a time; the journal outlives them."""

    def __init__(self, world: HostWorld) -> None:
        self.world = world
        self.machine: co.CoordinatorMachine | None = None
        self.term = world.options.counts_from
        self.forgotten = 0  # how often the journal was lost
        self.offset_s = 0.0
        self.outcome: str | None = None
        self.frozen = False
        self.servers = ServerHosts(world)
        self._backlog: deque[ce.CoordinatorEvent] = deque()
        self._wake_at: float | None = None

    @property
    def label(self) -> str:
        return f"coordinator.{self.term}"

    def start(self) -> None:
        if self.outcome is not None or self.machine is not None:
            return
        world = self.world
        self.term += 1
        self.offset_s = world.rng.uniform(0, 1000)  # another machine, another monotonic clock
        self._wake_at = None
        record = world.truth.membership.disk
        if record is not None and world.faults.loses_journal():
            self.forgotten += 1
            world.truth.membership.forgotten = True
            world.truth.membership.newest_lost = world.truth.membership.newest
        forgotten = world.truth.membership.forgotten
        world.truth.promises.record_coordinator_start(world.now)
        self.servers.record_coordinator_start()
        known = record.view if record is not None and not forgotten else None
        world.truth.promises.events.record_coordinator_start(known)
        self.machine = world.machines.coordinator(
            world.options.coordinator_policy(),
            self.term,
            None if forgotten else record,
            self._clock(),
            self.forgotten if forgotten else 0,
        )
        self.handle(Tick())

    def stop(self) -> None:
        """The operator ends the job; while no coordinator is there, it is asked again."""
        world = self.world
        if self.outcome is not None:
            return
        if self.machine is None or self.frozen or self.machine.snapshot().record.view is None:
            world.call_later(1.0, self.stop)
            return
        world.truth.endings.record_stop_request(self.machine.snapshot().step, world.now)
        self.handle(ce.StopRequested(STOPPED, saves=world.options.save_every > 0))

    def stop_at_once(self) -> None:
        """The operator does not wait for a last checkpoint any more."""
        asked = self.world.truth.endings.record_hurry()
        if asked and self.machine is not None and not self.frozen:
            self.handle(ce.StopRequested(STOPPED, saves=self.world.options.save_every > 0))

    def scale(self, servers: int) -> None:
        """The operator wants another number of servers; no coordinator is asked twice."""
        if self.machine is not None and not self.frozen:
            self.handle(ce.ServersAsked(servers))

    def crash(self) -> None:
        self.machine = None
        self.frozen = False
        self._backlog.clear()

    def thaw(self) -> None:
        """Resume, and handle in order the events that have arrived in the meantime."""
        self.frozen = False
        while self._backlog and not self.frozen:
            self.handle(self._backlog.popleft())

    def hear(self, report: AgentReport) -> None:
        self.handle(ce.ReportArrived(report))

    def handle(self, event: ce.CoordinatorEvent) -> None:
        machine, world = self.machine, self.world
        if machine is None:
            return
        if self.frozen:
            self._backlog.append(event)
            return
        if isinstance(event, ce.ReportArrived):
            world.truth.promises.record_report(event.report, world.now)
            world.truth.endings.record_report(event.report)
            self.servers.record_report(event.report)
        effects = machine.handle(event, self._clock())
        world.story.note(self, event, effects)
        machine.check()
        for effect in effects:
            if world.faults.strikes_coordinator():
                return
            self._carry_out(effect)
        if isinstance(event, ce.ReportArrived):
            world.truth.promises.events.check_report(event.report)
        self._sleep()

    def _carry_out(self, effect: ce.CoordinatorEffect) -> None:
        world = self.world
        match effect:
            case ce.Persist(record):
                world.truth.membership.check_record(record, world.now)
                self.servers.check_record(record)
            case ce.SendDirective(directive):
                world.truth.membership.check_directive(directive, world.now)
                host = world.hosts[directive.agent]
                world.truth.membership.check_answer(directive)
                world.network.transmit(host.name, False, host.hear, directive)
            case ce.Announce(kind, _, worker):
                disk = world.truth.membership.disk
                world.truth.promises.events.check_line(
                    effect, disk.view if disk is not None else None
                )
                if kind == "replaced" and "hung" in effect.text and worker is not None:
                    world.truth.processes.check_replacement(worker)
                if kind == "failed":
                    world.truth.endings.check_failure(effect.text)
            case ce.Finish(outcome):
                world.truth.check_outcome(outcome, world.now)
                self.outcome = outcome
                self.machine = None
                for host in world.hosts.values():
                    world.call_later(world.rng.uniform(0.0, WORD_S), host.look_for_word)

    def _clock(self) -> float:
        return self.world.now + self.offset_s

    def _sleep(self) -> None:
        if self.machine is None:
            return
        deadline = self.machine.deadline()
        if deadline is None:
            return
        at = deadline - self.offset_s + 1e-6
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self.world.call_later(max(at - self.world.now, 0.0), self._wake, self.term, at)

    def _wake(self, term: int, at: float) -> None:
        if self.machine is not None and self.term == term and self._wake_at == at:
            self._wake_at = None
            self.handle(Tick())


class DriftingClock:
    """Is the monotonic clock of a node, which its agent and its workers read."""

    def __init__(self, world: HostWorld) -> None:
        self.world = world
        self._rate = 1.0
        self._offset_s = 0.0

    def set_clock(self) -> None:
        """Draw the clock's rate and its time: the node begins."""
        self._rate = 1.0 + self.world.rng.uniform(-1, 1) * self.world.options.drift
        self._offset_s = self.world.rng.uniform(0, 1000)

    def clock(self) -> float:
        """Return the time of this clock."""
        return self.world.now * self._rate + self._offset_s

    def world_time(self, clock: float) -> float:
        """Return the world's time at which this clock has a time."""
        return (clock - self._offset_s) / self._rate


class Sampler:
    """Samples the processes of a node that stand still, as its agent does."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host
        self._watched: dict[int, Process | Further] = {}

    def forget(self) -> None:
        """Sample no process any more."""
        self._watched.clear()

    def watch(self, process: Process | Further) -> None:
        """Sample a process that is stopped, silent or paused, until it is seen to run again.

        Samples of healthy processes only set the detector back, so they are left out.
        """
        if self._watched.get(process.worker) is not process:
            self._watched[process.worker] = process
            self._sample(process, 0)

    def _sample(self, process: Process | Further, progress: int) -> None:
        if self._watched.get(process.worker) is not process or not process.alive:
            return
        # A frozen agent takes no sample.
        if self._host.frozen and process.paused:
            self._host.world.call_later(0.25, self._sample, process, progress)
            return
        stands = process.stopped or process.paused
        if not stands:
            progress += 1
        sample = ProcessSample(state="T" if stands else "S", progress=progress)
        self._host.handle(ag.Sampled(process.worker, Incarnation(process.key[1]), sample))
        if process.alive and not process.is_running:
            self._host.world.call_later(0.25, self._sample, process, progress)
        else:
            self._watched.pop(process.worker, None)


class AgentHost(DriftingClock):
    """Simulates a node: its agent's machine and its worker processes, which die with the agent."""

    def __init__(self, world: HostWorld, name: AgentId) -> None:
        super().__init__(world)
        self.name = name
        self.machine: ag.AgentMachine | None = None
        self.incarnation = world.options.counts_from
        self.started = False
        self.gone = False  # quit, or lost for good
        self.processes: dict[int, Process | Further] = {}  # by worker, newest
        self.sampler = Sampler(self)
        self.frozen = False  # the agent's process; its workers run on
        self.drained = False  # now or before
        self.writer = WriterHost(world, world.truth)
        self.memory = HostMemory(world.options.redundancy, self._take_memory_report)
        world.truth.memories.of[name] = self.memory
        self._held: tuple[KeptPieces, ...] | None = None  # what the agent has not seen there yet
        self._backlog: deque[ag.AgentEvent] = deque()
        self._channel_free: dict[int, float] = {}
        self._wake_at: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name}.{self.incarnation}"

    def start(self) -> None:
        if self.gone or self.machine is not None:
            return
        world, self.started = self.world, True
        self.incarnation += 1
        self.frozen = False
        self.set_clock()
        self._wake_at = None
        number, slots = Incarnation(self.incarnation), world.options.slots
        self.machine = world.machines.agent(
            self.name, number, slots, world.options.agent_policy(), job=world.names.job
        )
        if labels := world.options.find_domains(self.name):
            self.handle(ag.Labelled(labels))
        self.handle(Tick())
        if world.coordinator.outcome is not None:
            world.call_later(WORD_S, self.look_for_word)

    def look_for_word(self) -> None:
        """Find the word that the job has left, in its run directory or etcd, that it is over."""
        self.handle(ag.JobOver())

    def crash(self) -> None:
        """End the agent; the kernel takes its workers and its writer with it."""
        self.machine = None
        self.writer.crash()
        self.memory.lose()
        self._held = None
        self._backlog.clear()
        self.world.coordinator.servers.end(self)
        for process in list(self.processes.values()):
            process.end(-9, "its agent died")
        self.processes = {}
        self.sampler.forget()

    def hear(self, directive: Directive) -> None:
        self.handle(ag.DirectiveArrived(directive))

    def handle(self, event: ag.AgentEvent) -> None:
        machine, world = self.machine, self.world
        if machine is None:
            return
        if self.frozen:
            self._backlog.append(event)
            return
        if isinstance(event, ag.DirectiveArrived):
            world.coordinator.servers.obey(self, event.directive)
        if self._held is not None and _looks_at_memory(event):
            held, self._held = self._held, None
            self.handle(ag.MemoryHeld(held))
        effects = machine.handle(event, self.clock())
        world.story.note(self, event, effects)
        machine.check()
        for effect in effects:
            self._carry_out(effect)
        if not self._is_about_paused(event):
            self._sleep()

    def thaw(self) -> None:
        self.frozen = False
        while self._backlog and not self.frozen:
            self.handle(self._backlog.popleft())

    def _carry_out(self, effect: ag.AgentEffect) -> None:
        world = self.world
        match effect:
            case ag.SendReport(report):
                world.network.transmit(self.name, True, world.coordinator.hear, report)
            case ag.SendWorker(worker, incarnation, directive):
                process = self.processes.get(worker)
                if process is not None and process.key[1] == incarnation:
                    at = world.now + world.delay(world.options.channel_s)
                    at = max(at, self._channel_free.get(worker, 0.0))
                    self._channel_free[worker] = at
                    process.post(at - world.now, process.handle_directive, directive)
                    if world.options.servers:
                        later = world.coordinator.servers.inform
                        world.call_later(at - world.now, later, process, directive.layout)
            case ag.Spawn(worker, incarnation, _, place):
                if place:
                    self.processes[worker] = Further(world, self, worker, incarnation, place)
                else:
                    first = Process(world, self, worker, incarnation)
                    first.spoiling.lies = world.faults.workers.draw_lie_at_start(first)
                    world.record_start(first)
                    self.processes[worker] = first
                self.processes[worker].start()
                pid = world.count["spawns"]
                meets_at = "here" if world.options.spread > 1 and not place else ""
                self._handle_later(0.01, ag.Spawned(worker, incarnation, pid, meets_at))
            case ag.Kill(worker, incarnation, reason):
                world.count["kills"] += 1
                process = self.processes.get(worker)
                if process is not None and process.key[1] == incarnation:
                    if isinstance(process, Process):
                        world.truth.leaves.check_kill(process, reason, world.now)
                    world.call_later(world.rng.uniform(0.0, 0.05), process.end, -9, reason)
            case ag.Pause(worker, incarnation):
                process = self.processes.get(worker)
                if process is not None and process.key[1] == incarnation:
                    process.paused = True
                    self.sampler.watch(process)
            case ag.Resume(worker, incarnation):
                process = self.processes.get(worker)
                if process is not None and process.key[1] == incarnation:
                    process.paused = False
                    if isinstance(process, Process):
                        world.truth.processes.check_waking(process, world.truth.membership.newest)
                    process.wake()
            case ag.Quit(problem):
                over = world.coordinator.outcome is not None or problem != ""
                world.coordinator.servers.check_quit(self, over)
                world.truth.leaves.check_quit(self, world.now, over=over)
                self.memory.lose()
                self.gone = True
                self.machine = None

    # ------------------------------------------------------------ workers

    def handle_status(self, process: Process | Further, status: WorkerStatus) -> None:
        """Pass a process's status on to the agent, even if the process has just died."""
        current = self.processes.get(process.worker)
        if current is not None and current.key == process.key:
            self.handle(ag.WorkerSaid(status))

    def handle_process_end(
        self,
        process: Process | Further,
        code: int,
        detail: str,
        reported: bool = False,
        error: MachineError | None = None,
    ) -> None:
        """Report the end of a process to the agent, a little later."""
        incarnation = Incarnation(process.key[1])
        self._handle_later(
            0.02, ag.ProcessExited(process.worker, incarnation, code, detail, reported, error)
        )

    def _take_memory_report(self, kept: tuple[KeptPieces, ...]) -> None:
        self._held = kept

    def _is_about_paused(self, event: ag.AgentEvent) -> bool:
        """Return whether an event is about a paused process: then no deadline changes."""
        process = self.processes.get(event.worker) if isinstance(event, ag.Sampled) else None
        return process is not None and process.paused

    # ------------------------------------------------------------ time

    def _handle_later(self, delay_s: float, event: ag.AgentEvent) -> None:
        self.world.call_later(self.world.delay(delay_s), self._handle_if, self.incarnation, event)

    def _handle_if(self, incarnation: int, event: ag.AgentEvent) -> None:
        if self.incarnation == incarnation:
            self.handle(event)

    def _sleep(self) -> None:
        if self.machine is None:
            return
        deadline = self.machine.deadline()
        if deadline is None:
            return
        late_s = self.world.rng.uniform(0.0, self.world.options.late_s)
        at = max(self.world_time(deadline) + 1e-6, self.world.now) + late_s
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self.world.call_later(at - self.world.now, self._wake, self.incarnation, at)

    def _wake(self, incarnation: int, at: float) -> None:
        if self.machine is not None and self.incarnation == incarnation and self._wake_at == at:
            self._wake_at = None
            self.handle(Tick())


def _looks_at_memory(event: ag.AgentEvent) -> bool:
    """Return whether the agent looks at its memory: now and then, and when work has ended."""
    match event:
        case Tick() | ag.ProcessExited():
            return True
        case ag.WorkerSaid(status):
            return status.has_stopped
        case _:
            return False
