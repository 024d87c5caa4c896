"""Runs a tiny cluster around the machines of the core: only a story's commands move it.

The messages between machines wait for delivery; tasks, sums and copies are done when a
command of the story finishes them. There is no chance, and the clock only moves as messages are
delivered, or by a command of the story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.engine.core.directives import AgentReport, Directive, WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership.agent import AgentMachine, AgentPolicy
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.machine import WorkerMachine
from story_data import Group, Work
from story_feeding import Feeds
from story_memory import NodeMemories
from story_shards import Further, FurtherNodes, Shards
from story_text import Block, Scribe

HEARTBEAT_S = 0.5  # interval at which a worker repeats its status
INSTANT_S = 0.001  # the clock moves by this much with each event
ROUNDS_MAX = 400  # rounds of deliveries; a story that takes more is stuck


class StoryError(Exception):
    """Reports something impossible that a story asks for."""


@dataclass(frozen=True)
class Machines:
    """Names the classes of the machines; a test puts faulty ones in their places."""

    coordinator: Callable[..., CoordinatorMachine] = CoordinatorMachine
    agent: Callable[..., AgentMachine] = AgentMachine
    worker: Callable[..., WorkerMachine] = WorkerMachine


@dataclass(kw_only=True)
class Setting:
    """Describes the job, as a story's first command gives it."""

    workers: int
    virtual: int
    nodes: int
    until: int = 100
    coordinator: CoordinatorPolicy
    step: StepPolicy = field(default_factory=StepPolicy)


class Host:
    """Is one node: its agent, and the messages that wait for it."""

    def __init__(self, name: AgentId, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.incarnation = 0
        self.machine: AgentMachine | None = None
        self.frozen = False
        self.cut_off = False
        self.inbox: deque[Directive] = deque()
        self.local: deque[ag.AgentEvent] = deque()  # from its workers and their processes

    @property
    def runs(self) -> bool:
        """Return whether its agent exists and handles events."""
        return self.machine is not None and not self.frozen


class Process:
    """Is one process of a worker: its machine, and the tasks and exchanges under way."""

    def __init__(self, host: Host, machine: WorkerMachine, until: int, procs: int = 1) -> None:
        status = machine.snapshot()
        self.shards = Shards(procs)
        self.host = host
        self.machine = machine
        self.worker = status.worker
        self.incarnation = status.incarnation
        self.until = until
        self.alive = True
        self.paused = False
        self.frozen = False
        self.inbox: deque[WorkerDirective] = deque()
        self.work = Work()

    @property
    def name(self) -> str:
        """Return its name in stories."""
        return f"worker {self.worker}"

    @property
    def runs(self) -> bool:
        """Return whether it exists and handles events."""
        return self.alive and not self.paused and not self.frozen


class Cluster:
    """Drives the machines (see the module). `blocks`: their acts since they were last shown."""

    def __init__(self, setting: Setting, machines: Machines) -> None:
        self.setting = setting
        self.now = 0.0
        self._beat_at = HEARTBEAT_S
        self.blocks: list[Block] = []
        self.groups: dict[int, Group] = {}
        # The ranks whose shares are written, by step and view.
        self.shares: dict[tuple[int, int], set[int]] = {}
        self.processes: dict[WorkerId, Process] = {}  # the newest process of each worker
        self.feeds = Feeds()
        self.further = FurtherNodes()
        self.memories = NodeMemories(setting.coordinator.redundancy)
        self.coordinator: CoordinatorMachine | None = None
        self.reports: deque[AgentReport] = deque()
        self.record: JobRecord | None = None  # the journal's record
        self.term = 0
        self.forgotten = 0
        self._machines = machines
        self._scribe = Scribe()
        self.hosts: dict[AgentId, Host] = {}
        places, more = divmod(setting.workers * setting.coordinator.spread, setting.nodes)
        for i in range(setting.nodes):
            slots = places + (i < more) + (setting.coordinator.spares or 0)
            self.hosts[AgentId(f"node{i}")] = Host(AgentId(f"node{i}"), slots)

    # ------------------------------------------------------------ the coordinator and the agents

    def start_coordinator(self, *, journal: bool = True) -> None:
        """Start a coordinator, from the journal's record if there is one."""
        self.term += 1
        if not journal:
            self.record, self.forgotten = None, self.forgotten + 1
        self.coordinator = self._machines.coordinator(
            self.setting.coordinator, self.term, self.record, self.now, self.forgotten
        )
        self.tell_coordinator(ce.Tick())

    def tell_coordinator(self, event: ce.CoordinatorEvent) -> None:
        """Hand the coordinator an event, and carry out its effects."""
        machine = self.coordinator
        if machine is None:
            return
        effects = machine.handle(event, self._tick())
        machine.check()
        self.blocks.append(("coordinator", self._scribe.coordinator(effects)))
        for effect in effects:
            if isinstance(effect, ce.Persist):
                self.record = effect.record
            elif isinstance(effect, ce.SendDirective):
                host = self.hosts[effect.directive.agent]
                if not host.cut_off:
                    host.inbox.append(effect.directive)
            elif isinstance(effect, ce.Finish):
                self.coordinator = None

    def start_agent(self, host: Host) -> None:
        """Start a node's agent."""
        host.incarnation += 1
        host.frozen = False
        host.inbox.clear()
        host.local.clear()
        number = Incarnation(host.incarnation)
        policy = AgentPolicy(spares=self.setting.coordinator.spares or 0)
        host.machine = self._machines.agent(host.name, number, host.slots, policy)
        self.memories.add(host.name)
        self.tell_agent(host, ag.Tick())

    def tell_agent(self, host: Host, event: ag.AgentEvent) -> None:
        """Hand an agent an event, and carry out its effects."""
        machine = host.machine
        if machine is None:
            return
        effects = machine.handle(event, self._tick())
        machine.check()
        self.blocks.append((host.name, self._scribe.agent(host.name, effects)))
        for effect in effects:
            self._agent_does(host, effect)

    def _agent_does(self, host: Host, effect: ag.AgentEffect) -> None:
        match effect:
            case ag.SendReport(report):
                if not host.cut_off and self.coordinator is not None:
                    self.reports.append(report)
            case ag.Spawn(worker, incarnation, place=0):
                policy = self.setting.coordinator
                machine = self._machines.worker(worker, incarnation, self.setting.step)
                process = Process(host, machine, self.setting.until, policy.procs)
                self.processes[worker] = process
                if policy.spread > 1:
                    host.local.append(ag.Spawned(worker, incarnation, 1, "here"))
            case ag.Spawn(worker, incarnation, place=place):
                self.further.add(Further(worker, incarnation, host.name, place))
                host.local.append(ag.Spawned(worker, incarnation, 1))
            case ag.Quit():
                host.machine = None
            case _:
                self._agent_acts_on(host, effect)

    def _agent_acts_on(
        self, host: Host, effect: ag.SendWorker | ag.Kill | ag.Pause | ag.Resume
    ) -> None:
        process = self.processes[effect.worker]
        if process.incarnation != effect.incarnation or not process.alive:
            return
        if process.host is not host:
            for further in self.further.on(host.name) if isinstance(effect, ag.Kill) else ():
                if further.worker == effect.worker:
                    self.end_further(further, effect.reason)
            return
        match effect:
            case ag.SendWorker(_, _, directive):
                process.inbox.append(directive)
            case ag.Kill(_, _, reason):
                self.end(process, -9, reason)
            case ag.Pause():
                process.paused = True
            case ag.Resume():
                process.paused = False

    # ------------------------------------------------------------ workers

    def end(self, process: Process, code: int, detail: str = "") -> None:
        """End a process; its agent does not know it yet."""
        if not process.alive:
            return
        process.alive = False
        process.inbox.clear()
        group = self.groups.get(process.work.view)
        if group is not None:
            group.closed.add(process.worker)
        event = ag.ProcessExited(process.worker, process.incarnation, code, detail, not code)
        process.host.local.append(event)
        for further in self.further.of(process.worker, process.incarnation):
            self.end_further(further, "its worker has ended", well=not code)

    def end_further(self, further: Further, why: str, *, well: bool = False) -> None:
        """End the processes of a worker on one of its further nodes."""
        further.alive = False
        event = ag.ProcessExited(further.worker, further.incarnation, 0 if well else -9, why, well)
        self.hosts[further.node].local.append(event)

    def feed(self, process: Process, event: ev.WorkerEvent) -> None:
        """Hand a worker an event and carry out its effects, and theirs in turn."""
        self.feed_told(process, process.shards.hear(event))

    def feed_told(self, process: Process, told: Iterable[ev.WorkerEvent]) -> None:
        """Hand events to a worker's machine, and carry out its effects and theirs."""
        events, lines = deque[ev.WorkerEvent](), list[str]()
        for event in told:
            events.extend(self._tell_worker(process, event, lines))
        while events and process.alive:
            for event in process.shards.hear(events.popleft()):
                events.extend(self._tell_worker(process, event, lines))
        self.blocks.append((process.name, ("; ".join(lines),) if lines else ()))

    def _tell_worker(
        self, process: Process, event: ev.WorkerEvent, lines: list[str]
    ) -> Iterator[ev.WorkerEvent]:
        """Hand a worker's machine one event; add its lines, and yield the events that follow."""
        effects = process.machine.handle(event, self._tick())
        process.machine.check()
        view = process.machine.view
        lines += self._scribe.worker(effects, len(view.members) if view else 0)
        for effect in effects:
            yield from self._worker_does(process, effect)
        yield from self._script_goes_on(process)

    def go_on(self, process: Process) -> None:
        """Finish something for a script, without an event for its machine."""
        for event in list(self._script_goes_on(process)):
            self.feed(process, event)

    def _worker_does(self, process: Process, effect: ef.WorkerEffect) -> Iterator[ev.WorkerEvent]:
        work = process.work
        match effect:
            case ef.Tell(status):
                process.host.local.append(ag.WorkerSaid(status))
            case ef.Abort(number):
                for older in (g for n, g in self.groups.items() if n <= number):
                    older.closed.add(process.worker)
            case ef.Install(view):
                self.groups.setdefault(view.number, Group(view)).here.add(process.worker)
                work.install(view)
                process.shards.begin(view.number)
                self.memories.installed(process.worker, view)
            case ef.Exit():
                self.end(process, -9, "computes wrongly")
            case ef.GiveUp(reason):
                self.end(process, 1, reason)
            case ef.Commit():
                work.script = deque(e for e in work.script if not isinstance(e, ef.Compute))
                work.script.append(effect)
            case ef.Begin() | ef.Compute() | ef.CopyState() | ef.Release():
                work.script.append(effect)
            case ef.LookWhoIsLate(number, step):
                awaited = self.groups[number].awaited(process.worker)
                yield ev.StillAwaited(number, step, awaited)
            case ef.Follow() | ef.KeepStep(SinkKind.FOLLOWERS):
                yield from self.feeds.attend(process.worker, effect)
            case ef.ObtainState(SourceKind.FEED) | ef.ObtainStep(SourceKind.FEED):
                yield from self.feeds.attend(process.worker, effect)
            case (
                ef.MarkCommitted()
                | ef.Forget(SinkKind.MEMORY)
                | ef.KeepStep(SinkKind.MEMORY)
                | ef.ObtainState(SourceKind.MEMORY)
                | ef.ObtainStep(SourceKind.MEMORY)
            ):
                self.memories.attend(process.worker, self._nodes_of(process), effect)
            case _:
                group = self.groups.get(work.view)
                if group is not None and process.worker not in group.closed:
                    group.said(process.worker, work, effect)

    def _nodes_of(self, process: Process) -> tuple[AgentId, ...]:
        further = self.further.of(process.worker, process.incarnation)
        return (process.host.name, *(each.node for each in further))

    def _script_goes_on(self, process: Process) -> Iterator[ev.WorkerEvent]:
        """Make the script begin work that takes time, and do the rest of its work at once."""
        work = process.work
        while work.doing is None and work.script:
            effect = work.script.popleft()
            if isinstance(effect, ef.Begin):
                work.open(effect)
                if effect.step >= process.until:
                    yield ev.LoopFinishing()
                    yield ev.LoopEnded()
                else:
                    yield ev.StepOpened(effect.step)
            else:
                work.doing = effect

    # ------------------------------------------------------------ delivering

    def hear_reports(self, host: Host | None = None) -> bool:
        """Deliver the reports under way, or those of one node, to the coordinator."""
        found = [r for r in self.reports if host is None or r.agent == host.name]
        self.reports = deque(r for r in self.reports if r not in found)
        for report in found:
            self.tell_coordinator(ce.ReportArrived(report))
        return bool(found)

    def hear_directives(self, host: Host) -> bool:
        """Deliver to an agent the directives that the coordinator has sent it."""
        if not host.runs or not host.inbox:
            return False
        while host.inbox:
            self.tell_agent(host, ag.DirectiveArrived(host.inbox.popleft()))
        return True

    def hear_workers(self, host: Host) -> bool:
        """Deliver to an agent the statuses of its workers, and the ends of processes."""
        if not host.runs or not host.local:
            return False
        if held := self.memories.news(host.name):
            self.tell_agent(host, held)
        while host.local:
            self.tell_agent(host, host.local.popleft())
        return True

    def be_directed(self, process: Process) -> bool:
        """Deliver to a worker the directive that its agent has sent it."""
        if not process.runs or not process.inbox:
            return False
        while process.inbox and process.runs:
            self.feed(process, ev.Directed(process.inbox.popleft()))
        return True

    def settle(self) -> None:
        """Deliver all control messages, and the messages that follow, until none is left."""
        for _ in range(ROUNDS_MAX):
            moved = [self.hear_workers(host) for host in self.hosts.values()]
            moved.append(self.hear_reports())
            moved += [self.hear_directives(host) for host in self.hosts.values()]
            moved += [self.be_directed(process) for process in self.newest()]
            if not any(moved):
                if not self.review():
                    return
        raise StoryError("control messages never end")

    def review(self) -> bool:
        """Make the review that the coordinator puts off while many changes arrive."""
        machine = self.coordinator
        deadline = machine.deadline() if machine is not None else None
        if deadline is None or deadline > self.now + INSTANT_S:
            return False
        self.tell_coordinator(ce.Tick())
        return True

    def newest(self) -> list[Process]:
        """Return the newest process of each worker, in order."""
        return [process for _, process in sorted(self.processes.items())]

    # ------------------------------------------------------------ time

    def wait(self, seconds: float, *, heard: bool) -> None:
        """Advance the clock; `heard`: control messages are delivered in that time."""
        until = self.now + seconds
        if heard:
            self.settle()
        while (at := min([*self._deadlines(), self._beat_at])) < until:
            self.now = max(self.now, at)
            self._beat()
            for tick in list(self._due()):
                tick()
            if heard:
                self.settle()
        self.now = max(self.now, until)

    def _beat(self) -> None:
        """Make workers repeat their statuses, which show their progress."""
        if self.now >= self._beat_at:
            self._beat_at = self.now + HEARTBEAT_S
            for process in self.newest():
                if process.runs:
                    process.host.local.append(ag.WorkerSaid(process.machine.snapshot()))

    def _deadlines(self) -> Iterator[float]:
        hosts = [host.machine for host in self.hosts.values() if host.machine and host.runs]
        workers = [process.machine for process in self.newest() if process.runs]
        for machine in (self.coordinator, *hosts, *workers):
            deadline = machine.deadline() if machine is not None else None
            if deadline is not None:
                yield deadline

    def _due(self) -> Iterable[Callable[[], Any]]:
        """Yield the machines whose time has come, one by one, because one may end another."""
        machine = self.coordinator
        if machine is not None and _is_due(machine.deadline(), self.now):
            yield partial(self.tell_coordinator, ce.Tick())
        for host in self.hosts.values():
            if host.machine and host.runs and _is_due(host.machine.deadline(), self.now):
                yield partial(self.tell_agent, host, ag.Tick())
        for process in self.newest():
            if process.runs and _is_due(process.machine.deadline(), self.now):
                yield partial(self.feed, process, ev.Tick())

    def _tick(self) -> float:
        self.now += INSTANT_S
        return self.now

    # ------------------------------------------------------------ looking

    def view(self) -> View | None:
        """Return the newest view that any worker has installed."""
        numbers = [p.machine.view for p in self.newest() if p.machine.view is not None]
        return max(numbers, key=lambda v: v.number, default=None)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
