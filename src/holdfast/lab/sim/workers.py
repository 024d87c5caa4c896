"""Simulates one worker process: its control thread and the driver of its machine.

It mirrors the real driver: the machine decides, and this carries out. A process can end at any
point, also between two effects.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.effects import WorkerEffect
from holdfast.engine.core.ground.events import Purpose, WorkerEvent
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.types import AgentId, Incarnation, Tick, WorkerId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.arithmetic import Spoiling
from holdfast.lab.sim.exchanges import Exchanges, ExchangeWorld
from holdfast.lab.sim.feeds import Feeds, FeedWorld
from holdfast.lab.sim.groups import Group, What
from holdfast.lab.sim.scripts import SimulatedScript
from holdfast.lab.sim.seams import Ailments, ProcessNode, ProcessWatch, ScriptWork, Tie
from holdfast.lab.sim.simulated_mover import MESSAGES, SimulatedMover, StateOrder, StateWorld
from holdfast.lab.sim.spread import Running, Spread, SpreadWorld
from holdfast.lab.sim.step_checks import check_script
from holdfast.lab.sim.stored import WriterHost
from holdfast.lab.sim.timeline import Story

LATE_S = 1e-6  # a timer that fires later finds that its process stood still


class InsideStriker(Protocol):
    """Ends processes between two effects."""

    def strikes_inside(self, process: Process) -> bool: ...


class WorkerMaker(Protocol):
    """Makes the machines of workers, perhaps faulty ones."""

    @property
    def worker(self) -> type[WorkerMachine]: ...


class WorkerWorld(ExchangeWorld, StateWorld, FeedWorld, SpreadWorld, Protocol):
    """Is the world around a process."""

    @property
    def machines(self) -> WorkerMaker: ...

    @property
    def faults(self) -> InsideStriker: ...

    def record_end(self, process: Process) -> None: ...

    @property
    def story(self) -> Story: ...


class WorkerNode(ProcessNode, Protocol):
    """Is the node that a process runs on."""

    @property
    def name(self) -> AgentId: ...

    @property
    def writer(self) -> WriterHost: ...

    def world_time(self, clock: float) -> float: ...

    def handle_status(self, process: Process, status: WorkerStatus) -> None: ...

    def handle_process_end(
        self,
        process: Process,
        code: int,
        detail: str,
        reported: bool = False,
        error: MachineError | None = None,
    ) -> None: ...

    @property
    def sampler(self) -> ProcessWatch: ...


class Process(Running):
    """Simulates the process of one incarnation of a worker."""

    def __init__(
        self, world: WorkerWorld, host: WorkerNode, worker: WorkerId, incarnation: Incarnation
    ) -> None:
        super().__init__(world, (int(worker), int(incarnation)))
        self.world = world
        self.host = host
        self.machine = world.machines.worker(
            worker, incarnation, world.options.step_policy(), world.data.results.counting_of
        )
        self.health = Ailments()
        self.tie = Tie()
        self.spoiling = Spoiling(world.rng, world.truth.count)
        self.exchanges = Exchanges(self, world)
        self.feeds = Feeds(self, world)
        self.mover = SimulatedMover(self, world, host.writer, self.feeds)
        self.script = SimulatedScript(self, world)
        self.spread = Spread(world, self, host.memory, self._hand)
        self._events: deque[WorkerEvent] = deque()
        self._feeding = False
        self._reports = StatusChannel(self)
        self._alarm = Alarm(self)

    @property
    def agent(self) -> AgentId:
        """Return the node that it runs on."""
        return self.host.name

    @property
    def worker(self) -> WorkerId:
        """Return the worker that it is an incarnation of."""
        return WorkerId(self.key[0])

    @property
    def work(self) -> ScriptWork:
        """Return the state that its script holds."""
        return self.script.work

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Boot the script: the process was started."""
        options = self.world.options
        if options.feeds and options.procs == 1:  # no worker of several processes can be fed
            self.feed(ev.Reachable("here"))
        if options.spread == 1:
            self.run_script()
        self.post(self.world.rng.uniform(0.0, options.heartbeat_s), self._reports.beat)

    def run_script(self) -> None:
        """Run the script: all processes of this worker are here."""
        self.post(
            self.world.rng.uniform(0.5, 1.5) * self.world.options.boot_s, self.script.enter_loop
        )

    def end(
        self,
        code: int,
        detail: str = "",
        *,
        reported: bool = False,
        error: MachineError | None = None,
    ) -> None:
        """End the process at this very moment; its agent learns of it a little later.

        `reported`: its script has ended, and has reported that. `error`: its machine's own.
        """
        if not self.alive:
            return
        self.die()
        self.world.record_end(self)
        if error is not None:
            self.world.truth.endings.record_machine_error(self.worker)
        self.feeds.break_off()
        self.spread.end_others(well=reported)
        if self.tie.group is not None:
            self.world.data.close(self, self.tie.group, "peer died")
        self.host.handle_process_end(self, code, detail, reported, error)

    def open_group(self, number: int) -> Group | None:
        """Return its end of the group of a view, while that is open."""
        group = self.tie.group
        return group if group is not None and group.number == number and group.open else None

    # ------------------------------------------------------------ the machine's driver

    def feed(self, event: WorkerEvent) -> None:
        """Take in an event of this process; it may wait for the worker's other processes."""
        world = self.world
        shaky = bool(world.options.faults) and world.now < world.options.faults_end_s
        for told in self.spread.shards.follow_first(
            event, world.now, self.spread.call_shard_later, may_break=shaky
        ):
            self._hand(told)
        if self.spread.shards.lag_s(world.now) > world.options.hang_s / 4:
            self.health.ailing = True

    def _hand(self, event: WorkerEvent) -> None:
        """Hand one event to the machine and carry out its effects, in order, to the end."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        while self._events and self.alive:
            event = self._events.popleft()
            before = self.machine.snapshot().view
            effects = self.machine.handle(event, self.host.clock())
            self.world.story.note(self, event, effects)
            self.machine.check()
            for effect in effects:
                if self.alive and not self.world.faults.strikes_inside(self):
                    self._carry_out(effect, event, before)
            if self.alive:
                self.world.truth.processes.check_leaders(self)
        self._feeding = False
        if self.alive and not self.spread.shards.behind:
            check_script(self, self.machine.snapshot())
        self._alarm.set()

    def _carry_out(self, effect: WorkerEffect, event: WorkerEvent, before: int) -> None:
        world = self.world
        match effect:
            case ef.Tell(status):
                self._reports.send(status)
            case ef.Abort(number):
                if self.tie.group is not None and self.tie.group.number <= number:
                    world.data.close(self, self.tie.group, "peer aborted")
            case ef.Install(view):
                world.truth.membership.check_install(
                    self, view, before, self._reports.newest.promised
                )
                world.truth.steps.check_hosts(view.number, view.resume_step, view.owners)
                self.tie.is_connected = False
                self.spread.shards.enter(view.number)
                self.exchanges.enter(view)
                self.mover.enter(view)
                world.data.install(self, view)
            case ef.Exit():
                world.truth.errors.record_notice([self.key])
                self.end(-9, "computes wrongly")
            case ef.GiveUp(reason, by_script):
                if by_script:
                    world.truth.endings.check_script_blame(self.exchanges.view, reason)
                self.end(1, reason)
            case ef.Redo(_):
                self.work.tokens, self.work.copies = {}, {}
                world.truth.count["redone"] += 1
            case ef.Adopt(vrank):
                world.truth.steps.check_adoption(self, vrank)
                self.work.tokens[vrank] = self.work.copies.pop(vrank)
            case ef.Withdraw(invalidations):
                world.truth.stored.withdraw(invalidations)
            case ef.NoteDoubt(_, _, again):
                world.truth.errors.check_doubt(again)
            case ef.Commit():
                self.script.commit(effect)
                if isinstance(event, ev.Gathered):
                    can_save = world.options.next_rest(effect.step) < self.script.until
                    if world.data.results.announces(event.rows, can_save=can_save):
                        self.tie.last_step_of = event.view
                number, by_vote = self.machine.snapshot().view, isinstance(event, ev.Gathered)
                world.truth.steps.check_vote(self, effect.step, by_vote=by_vote)
                if by_vote:
                    world.truth.proofs.record_vote(number, effect.step)
                self.spread.apply_commit(number, effect)
                self.script.run()
            case ef.MarkCommitted(number, step):
                self.spread.visit_memories(
                    lambda memory, _, __: memory.mark(number, self.worker, step)
                )
            case _ if isinstance(effect, ef.ScriptEffect):
                if isinstance(effect, ef.Release):
                    world.truth.check_release(self, effect.loop)
                if isinstance(effect, ef.Compute) and effect.purpose is Purpose.SPECULATIVE:
                    world.truth.steps.check_copy(self, effect.step, effect.vrank)
                self.script.order(effect)
            case _:
                self._carry_out_in_view(effect)

    def _carry_out_in_view(self, effect: WorkerEffect) -> None:
        group = self.tie.group if self.tie.group is not None and self.tie.group.open else None
        if isinstance(effect, StateOrder):
            self.mover.carry_out(effect, group)
        elif group is not None:
            self.exchanges.carry_out(effect, group)

    def handle_connection(self, number: int) -> None:
        """Record that all members of the view's group are connected."""
        group = self.open_group(number)
        if group is not None:
            self.tie.is_connected = True
            self.feed(ev.Connected(group.view.number))

    def receive(self, what: What) -> None:
        """Take in a message of other members."""
        if self.tie.group is not None and self.tie.group.open:
            part = self.mover if what[0] in MESSAGES else self.exchanges
            part.receive(what, self.tie.group)

    def handle_directive(self, directive: WorkerDirective) -> None:
        """Take in a directive that the agent passes on."""
        self.feed(ev.Directed(directive))


class StatusChannel:
    """Takes statuses from a process to its agent, in their order."""

    def __init__(self, process: Process) -> None:
        self.newest = process.machine.snapshot()
        self._process = process
        self._free_at = 0.0

    def send(self, status: WorkerStatus) -> None:
        """Send a status to the agent."""
        world = self._process.world
        before, self.newest = self.newest, status
        world.truth.check_status(self._process, before, status)
        world.truth.leaves.record_status(status)
        world.truth.proofs.record_promise(self._process.key, before, status, world.now)
        if status.proved_at != before.proved_at:
            proved_at = self._process.host.world_time(status.proved_at)
            step = status.committed - 1
            world.truth.proofs.check_proof(self._process.key, status.view, step, proved_at)
        at = max(world.now + world.delay(world.options.channel_s), self._free_at)
        self._free_at = at
        world.call_later(at - world.now, self._process.host.handle_status, self._process, status)

    def beat(self) -> None:
        """Send the status now, and again after each heartbeat."""
        self.send(self._process.machine.snapshot())
        self._process.post(self._process.world.options.heartbeat_s, self.beat)


class Alarm:
    """Wakes the machine of a process when it wants to be."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._wake_at: float | None = None

    def set(self) -> None:
        """Look when the machine wants to be woken; the control thread looks ten times a second."""
        deadline = self._process.machine.deadline()
        if deadline is None or deadline == float("inf") or not self._process.alive:
            return
        at = self._process.host.world_time(deadline) + self._process.world.rng.uniform(0.0, 0.1)
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self._process.post(max(at - self._process.world.now, 0.0), self._wake, at)

    def _wake(self, at: float) -> None:
        if self._wake_at != at:
            return
        if (
            self._process.world.now > at + LATE_S
        ):  # it stood still: messages of the agent are read first
            pause_s = self._process.world.rng.uniform(0.0, 0.1)
            self._wake_at = self._process.world.now + pause_s
            self._process.post(pause_s, self._wake, self._wake_at)
            return
        self._wake_at = None
        self._process.feed(Tick())
