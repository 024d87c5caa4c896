"""Simulates the coordinator's and the agents' processes, and the control network between them.

The network loses, repeats, delays and reorders; partitions cut either direction or both. A host
that crashes loses its memory; only the coordinator's journal is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from holdfast.engine.core.directives import AgentReport, Directive
from holdfast.engine.core.job_spec import CoordinatorPolicy
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
from holdfast.lab.sim.workers import InsideStriker, Process, WorkerMaker, WorkerWorld
from holdfast.lab.sim.writers import WriterHost

WORD_S = 0.5  # for an agent without a coordinator to look whether the job has left word


class HostStriker(InsideStriker, Protocol):
    """Ends coordinators between two effects, and loses their journals."""

    def strikes_coordinator(self) -> bool: ...

    def loses_journal(self) -> bool: ...

    def draw_lie_at_start(self, process: Process) -> int: ...


class HostMaker(WorkerMaker, Protocol):
    """Makes the machines of coordinators and agents, perhaps faulty ones."""

    @property
    def coordinator(self) -> type[co.CoordinatorMachine]: ...

    @property
    def agent(self) -> type[ag.AgentMachine]: ...


class HostWorld(WorkerWorld, Protocol):
    """Is the world around coordinator and agents."""

    count: dict[str, int]
    job: str

    @property
    def machines(self) -> HostMaker: ...

    @property
    def faults(self) -> HostStriker: ...

    @property
    def coordinator(self) -> CoordinatorHost: ...

    @property
    def hosts(self) -> Mapping[AgentId, AgentHost]: ...

    @property
    def agent_policy(self) -> ag.AgentPolicy: ...

    @property
    def coordinator_policy(self) -> CoordinatorPolicy: ...

    def record_start(self, process: Process) -> None: ...

    def transmit(
        self, agent: str, up: bool, hear: Callable[[Any], None], message: object
    ) -> None: ...


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

    def start(self) -> None:
        if self.outcome is not None or self.machine is not None:
            return
        world = self.world
        self.term += 1
        self.offset_s = world.rng.uniform(0, 1000)  # another machine, another monotonic clock
        self._wake_at = None
        record = world.truth.disk
        if record is not None and world.faults.loses_journal():
            self.forgotten += 1
            world.truth.forgotten = True
            world.truth.newest_lost = world.truth.newest
        forgotten = world.truth.forgotten
        world.truth.promises.record_coordinator_start(world.now)
        self.servers.record_coordinator_start()
        known = record.view if record is not None and not forgotten else None
        world.truth.promises.events.record_coordinator_start(known)
        self.machine = world.machines.coordinator(
            world.coordinator_policy,
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
        """The operator wants another number of servers; nobody is asked twice."""
        if self.machine is not None and not self.frozen:
            self.handle(ce.ServersAsked(servers))

    def crash(self) -> None:
        self.machine = None
        self.frozen = False
        self._backlog.clear()

    def thaw(self) -> None:
        """Go on, and handle in order the events that came meanwhile."""
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
        world.note(self, event, effects)
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
                world.truth.check_record(record, world.now)
                self.servers.check_record(record)
            case ce.SendDirective(directive):
                world.truth.check_directive(directive, world.now)
                host = world.hosts[directive.agent]
                world.truth.check_answer(directive)
                world.transmit(host.name, False, host.hear, directive)
            case ce.Announce(kind, _, worker):
                disk = world.truth.disk
                world.truth.promises.events.check_line(
                    effect, disk.view if disk is not None else None
                )
                if kind == "replaced" and "hung" in effect.text and worker is not None:
                    world.truth.check_replacement(worker)
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


class AgentHost:
    """Simulates a node: its agent's machine and its worker processes, which die with the agent."""

    def __init__(self, world: HostWorld, name: AgentId) -> None:
        self.world = world
        self.name = name
        self.machine: ag.AgentMachine | None = None
        self.incarnation = world.options.counts_from
        self.started = False
        self.gone = False  # quit, or lost for good
        self.processes: dict[int, Process | Further] = {}  # by worker, newest
        self.rate = 1.0
        self.offset_s = 0.0
        self.frozen = False  # the agent's process; its workers run on
        self.drained = False  # now or before
        self.writer = WriterHost(world, world.truth)
        self.memory = HostMemory(world.options.redundancy, self._take_memory_report)
        world.truth.memories.of[name] = self.memory
        self._held: tuple[KeptPieces, ...] | None = None  # what the agent has not seen there yet
        self._backlog: deque[ag.AgentEvent] = deque()
        self._channel_free: dict[int, float] = {}
        self._watched: dict[int, Process | Further] = {}
        self._wake_at: float | None = None

    def start(self) -> None:
        if self.gone or self.machine is not None:
            return
        world, self.started = self.world, True
        self.incarnation += 1
        self.frozen = False
        self.rate = 1.0 + world.rng.uniform(-1, 1) * world.options.drift
        self.offset_s = world.rng.uniform(0, 1000)
        self._wake_at = None
        number, slots = Incarnation(self.incarnation), world.options.slots
        self.machine = world.machines.agent(
            self.name, number, slots, world.agent_policy, job=world.job
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
        """Let the agent die; the kernel takes its workers and its writer with it."""
        self.machine = None
        self.writer.crash()
        self.memory.lose()
        self._held = None
        self._backlog.clear()
        self.world.coordinator.servers.end(self)
        for process in list(self.processes.values()):
            process.end(-9, "its agent died")
        self.processes = {}
        self._watched = {}

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
        world.note(self, event, effects)
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
                world.transmit(self.name, True, world.coordinator.hear, report)
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
                    first.spoiling.lies = world.faults.draw_lie_at_start(first)
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
                    self.watch(process)
            case ag.Resume(worker, incarnation):
                process = self.processes.get(worker)
                if process is not None and process.key[1] == incarnation:
                    process.paused = False
                    if isinstance(process, Process):
                        world.truth.check_waking(process)
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
        """Pass on what a process said, even just before it died, to the agent."""
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
        """Have the agent hear that a process has ended, a little later."""
        incarnation = Incarnation(process.key[1])
        self._handle_later(
            0.02, ag.ProcessExited(process.worker, incarnation, code, detail, reported, error)
        )

    def _take_memory_report(self, kept: tuple[KeptPieces, ...]) -> None:
        self._held = kept

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
        if self.frozen and process.paused:  # nobody looks
            self.world.call_later(0.25, self._sample, process, progress)
            return
        stands = process.stopped or process.paused
        if not stands:
            progress += 1
        sample = ProcessSample(state="T" if stands else "S", progress=progress)
        self.handle(ag.Sampled(process.worker, Incarnation(process.key[1]), sample))
        if process.alive and not process.is_running:
            self.world.call_later(0.25, self._sample, process, progress)
        else:
            self._watched.pop(process.worker, None)

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

    def clock(self) -> float:
        """Return the time of this node's monotonic clock, which its workers read as well."""
        return self.world.now * self.rate + self.offset_s

    def world_time(self, clock: float) -> float:
        return (clock - self.offset_s) / self.rate

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
