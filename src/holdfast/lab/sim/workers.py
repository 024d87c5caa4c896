"""Simulates one worker process: its script, its control thread and the driver of its machine.

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
from holdfast.engine.core.ground.events import Purpose, StepKind, WorkerEvent
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.step.audit import FICKLE, RUNS_DISPUTED
from holdfast.engine.core.types import AgentId, Incarnation, Tick, WorkerId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.arithmetic import INITIAL_STATE, Spoiling, apply
from holdfast.lab.sim.arithmetic import task as right
from holdfast.lab.sim.endings import SCRIPT_FAILED
from holdfast.lab.sim.exchanges import Exchanges, ExchangeWorld
from holdfast.lab.sim.feeds import Feeds, FeedWorld
from holdfast.lab.sim.groups import Group, What
from holdfast.lab.sim.seams import ProcessNode, ProcessWatch
from holdfast.lab.sim.simulated_mover import MESSAGES, SimulatedMover, StateOrder, StateWorld
from holdfast.lab.sim.spread import Running, Spread, SpreadWorld
from holdfast.lab.sim.step_checks import check_script
from holdfast.lab.sim.stored import WriterHost
from holdfast.lab.sim.timeline import Story
from holdfast.lab.sim.wrong_bits import Violation

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
    """Simulates the process of one incarnation of a worker. `state`: None while it is written."""

    def __init__(
        self, world: WorkerWorld, host: WorkerNode, worker: WorkerId, incarnation: Incarnation
    ) -> None:
        super().__init__(world, (int(worker), int(incarnation)))
        self.world = world
        self.host = host
        self.agent = host.name
        self.worker = worker
        self.machine = world.machines.worker(
            worker, incarnation, world.options.step_policy(), world.data.results.counting_of
        )
        self.silenced = False  # it was silent at some time
        self.froze = False  # it was stopped by a fault at some time
        self.stuck = False  # the main thread never comes back
        self.ailing = False  # stuck or very slow at some time: it may count as hung
        self.slowness = 1.0
        self.state: int | None = INITIAL_STATE
        self.step = 0  # steps applied to `state`
        self.spoiling = Spoiling(world.rng, world.truth.count)
        self.exchanges = Exchanges(self, world)
        self.feeds = Feeds(self, world)
        self.mover = SimulatedMover(self, world, host.writer, self.feeds)
        self.tokens: dict[int, int] = {}  # results of the tasks that it hosts
        self.copies: dict[int, int] = {}  # results of its speculative tasks
        self.compute_us = 0  # compute time of the step's tasks so far
        self.total: int | None = None
        self.total_step = -1
        self.loop = 0
        self.open_step = -1  # the step that its script computes
        self.whole = False  # all of the state is looked at in it
        self.at_rest = False  # the script is held between two steps
        self.group: Group | None = None
        self.is_connected = False
        self.last_step_of = -1  # the view whose vote announced a planned change
        self.cut_through = -1  # messages of views up to this one are lost
        self.spread = Spread(world, self, host.memory, self._hand)
        self._script: deque[ef.ScriptEffect] = deque()
        self._copying = False  # it computes a speculative task
        self._busy = False  # the script computes a task, applies a step or copies its share
        self._events: deque[WorkerEvent] = deque()
        self._feeding = False
        self._channel_free = 0.0
        self._said = self.machine.snapshot()
        self._wake_at: float | None = None

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Boot the script: the process was started."""
        options = self.world.options
        if options.feeds and options.procs == 1:  # no worker of several processes can be fed
            self.feed(ev.Reachable("here"))
        if options.spread == 1:
            self.run_script()
        self.post(self.world.rng.uniform(0.0, options.heartbeat_s), self._heartbeat)

    def run_script(self) -> None:
        """Run the script: all processes of this worker are here."""
        self.post(self.world.rng.uniform(0.5, 1.5) * self.world.options.boot_s, self._enter_loop)

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
        self.alive = False
        self.world.record_end(self)
        if error is not None:
            self.world.truth.endings.record_machine_error(self.worker)
        self.feeds.break_off()
        self.spread.end_others(well=reported)
        if self.group is not None:
            self.world.data.close(self, self.group, "peer died")
        self.host.handle_process_end(self, code, detail, reported, error)

    def open_group(self, number: int) -> Group | None:
        """Return its end of the group of a view, while that is open."""
        group = self.group
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
            self.ailing = True

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
        self._arm()

    def _arm(self) -> None:
        """Wake the machine when it wants to be; the control thread looks ten times a second."""
        deadline = self.machine.deadline()
        if deadline is None or deadline == float("inf") or not self.alive:
            return
        at = self.host.world_time(deadline) + self.world.rng.uniform(0.0, 0.1)
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self.post(max(at - self.world.now, 0.0), self._wake, at)

    def _wake(self, at: float) -> None:
        if self._wake_at != at:
            return
        if self.world.now > at + LATE_S:  # it stood still: messages of the agent are read first
            pause_s = self.world.rng.uniform(0.0, 0.1)
            self._wake_at = self.world.now + pause_s
            self.post(pause_s, self._wake, self._wake_at)
            return
        self._wake_at = None
        self.feed(Tick())

    def _carry_out(self, effect: WorkerEffect, event: WorkerEvent, before: int) -> None:
        world = self.world
        match effect:
            case ef.Tell(status):
                self._tell(status)
            case ef.Abort(number):
                if self.group is not None and self.group.number <= number:
                    world.data.close(self, self.group, "peer aborted")
            case ef.Install(view):
                world.truth.membership.check_install(self, view, before, self._said.promised)
                world.truth.steps.check_hosts(view.number, view.resume_step, view.owners)
                self.is_connected = False
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
                self.tokens, self.copies = {}, {}
                world.truth.count["redone"] += 1
            case ef.Adopt(vrank):
                world.truth.steps.check_adoption(self, vrank)
                self.tokens[vrank] = self.copies.pop(vrank)
            case ef.Withdraw(invalidations):
                world.truth.stored.withdraw(invalidations)
            case ef.NoteDoubt(_, _, again):
                world.truth.errors.check_doubt(again)
            case ef.Commit():
                # Its tasks that have not begun are cancelled.
                kept = [each for each in self._script if not isinstance(each, ef.Compute)]
                self._script = deque([*kept, effect])
                if isinstance(event, ev.Gathered):
                    can_save = world.options.next_rest(effect.step) < self.until
                    if world.data.results.announces(event.rows, can_save=can_save):
                        self.last_step_of = event.view
                number, by_vote = self.machine.snapshot().view, isinstance(event, ev.Gathered)
                world.truth.steps.check_vote(self, effect.step, by_vote=by_vote)
                if by_vote:
                    world.truth.proofs.record_vote(number, effect.step)
                self.spread.apply_commit(number, effect)
                self._run_script()
            case ef.MarkCommitted(number, step):
                self.spread.visit_memories(
                    lambda memory, _, __: memory.mark(number, self.worker, step)
                )
            case _ if isinstance(effect, ef.ScriptEffect):
                if isinstance(effect, ef.Release):
                    world.truth.check_release(self, effect.loop)
                if isinstance(effect, ef.Compute) and effect.purpose is Purpose.SPECULATIVE:
                    world.truth.steps.check_copy(self, effect.step, effect.vrank)
                self._script.append(effect)
                self._run_script()
            case _:
                self._carry_out_in_view(effect)

    def _carry_out_in_view(self, effect: WorkerEffect) -> None:
        group = self.group if self.group is not None and self.group.open else None
        if isinstance(effect, StateOrder):
            self.mover.carry_out(effect, group)
        elif group is not None:
            self.exchanges.carry_out(effect, group)

    def handle_connection(self, number: int) -> None:
        """Record that all members of the view's group are connected."""
        group = self.open_group(number)
        if group is not None:
            self.is_connected = True
            self.feed(ev.Connected(group.view.number))

    def receive(self, what: What) -> None:
        """Take in a message of other members."""
        if self.group is not None and self.group.open:
            part = self.mover if what[0] in MESSAGES else self.exchanges
            part.receive(what, self.group)

    def handle_directive(self, directive: WorkerDirective) -> None:
        """Take in a directive that the agent passes on."""
        self.feed(ev.Directed(directive))

    def _tell(self, status: WorkerStatus) -> None:
        """Over the channel to the agent, which keeps order."""
        world = self.world
        before, self._said = self._said, status
        world.truth.check_status(self, before, status)
        world.truth.leaves.record_status(status)
        world.truth.proofs.record_promise(self.key, before, status, world.now)
        if status.proved_at != before.proved_at:
            proved_at = self.host.world_time(status.proved_at)
            step = status.committed - 1
            world.truth.proofs.check_proof(self.key, status.view, step, proved_at)
        at = max(world.now + world.delay(world.options.channel_s), self._channel_free)
        self._channel_free = at
        world.call_later(at - world.now, self.host.handle_status, self, status)

    def _heartbeat(self) -> None:
        self._tell(self.machine.snapshot())
        self.post(self.world.options.heartbeat_s, self._heartbeat)

    # ------------------------------------------------------------ the script

    @property
    def is_busy(self) -> bool:
        """Return whether its script is computing, or has tasks to compute."""
        return self._busy or bool(self._script)

    @property
    def can_wait(self) -> bool:
        """Return whether its tasks no longer count, or follow a speculative one."""
        if self._copying:
            return True
        view, step = self.exchanges.view, self.machine.snapshot().committed
        ranks = (
            self.world.truth.steps.counted.get((view.number, step)) if view is not None else None
        )
        return ranks is not None and self.exchanges.rank not in ranks

    @property
    def until(self) -> int:
        """Return the step at which the present loop of its script ends."""
        options = self.world.options
        end = options.loops[max(self.loop, 1) - 1]
        return min(end, options.parts_at) if not self.worker and options.parts_at >= 0 else end

    def _enter_loop(self) -> None:
        self.loop += 1
        self.feed(ev.LoopEntered(self.world.options.exact_bits))
        if self.step >= self.until and self.machine.snapshot().has_state:
            self._leave_loop()
        else:
            self._rest()

    def _leave_loop(self) -> None:
        """Leave the loop: a leader that shares the state waits until all have theirs."""
        self.feed(ev.LoopFinishing())
        if not self.world.options.shard_optimizer:
            self._finish_loop()
            return
        leads = self.machine.leads(self.host.clock())
        self.exchanges.meet("end", self._finish_loop if leads else lambda: None)
        if not leads:
            self._finish_loop()

    def _finish_loop(self) -> None:
        self.feed(ev.LoopEnded())

    def _rest(self) -> None:
        self.at_rest = True
        self.feed(ev.AtBoundary())

    def _run_script(self) -> None:
        """Do what the machine wants of the script, one thing after the other."""
        while self._script and not self._busy and self.alive:
            self._do_in_script(self._script.popleft())

    def _do_in_script(self, effect: ef.ScriptEffect) -> None:
        world = self.world
        match effect:
            case ef.Begin(step, whole):
                self._begin(step, whole)
            case ef.Compute() if world.truth.rows.are_lost(self.machine.snapshot().view):
                world.truth.count["rows found lost"] += 1
                self._busy = True  # it waits for its end, as no task can read its rows
                self.feed(ev.StateLost())
            case ef.Compute():
                self._busy = True
                self._copying = effect.purpose is Purpose.SPECULATIVE
                spread = world.options.task_spread
                share = world.rng.uniform(1 - spread, 1 + spread)
                delay_s = share * world.options.task_s * self.slowness
                timed = world.options.kind_of(effect.step) is StepKind.GRADIENTS
                if effect.purpose is Purpose.HOSTED and timed:
                    self.compute_us += int(delay_s * 1e6)
                self.post(delay_s, self._finish_task, effect)
            case ef.Commit(step=step):
                self._commit(step)
            case ef.CopyState():
                self._busy = True
                delay_s = world.delay(world.options.load_s) / 4
                self.post(delay_s, self._finish_copy, effect, world.now)
            case ef.Release(_):
                self.post(world.delay(0.001), self._leave_script_loop)

    def _begin(self, step: int, whole: bool) -> None:
        self.at_rest = False
        self.world.truth.steps.check_beginning(self)
        if step >= self.until:
            self._leave_loop()
            return
        if not self.world.options.rests_before(step):
            raise Violation(f"worker {self.key} begins step {step}, which follows no boundary")
        self._open(step, whole, rested=True)

    def _open(self, step: int, whole: bool, *, rested: bool) -> None:
        self.open_step, self.whole = step, whole or step == self.until - 1
        self.tokens, self.copies, self.compute_us = {}, {}, 0
        self.world.truth.steps.check_opening(self, step)
        self.feed(ev.StepOpened(step, self.world.options.kind_of(step), rested))

    def _finish_task(self, task: ef.Compute) -> None:
        if self.stuck:
            self.post(0.25, self._finish_task, task)
            return
        self._busy = self._copying = False
        if self.world.options.fails_in == task.step:
            self.world.truth.count["failed"] += 1
            by_machine = self.world.options.fails_by_machine
            self.end(1, SCRIPT_FAILED, error=MachineError.DISK_FULL if by_machine else None)
            return
        if task.step == self.open_step and self.step == self.open_step:
            token = told = self._token(task)
            if task.purpose is Purpose.HOSTED:
                self.tokens[task.vrank] = token
            elif task.purpose is Purpose.SPECULATIVE:
                self.copies[task.vrank] = token
                self.world.truth.count["copied"] += 1
            if task.disputed and self.world.options.exact_bits:
                again = {self._token(task) for _ in range(RUNS_DISPUTED - 1)}
                told = token if again == {token} else FICKLE
            digest = told if task.digest else None
            self.feed(ev.TaskDone(task.step, task.vrank, task.purpose, 1, digest))
        self._run_script()

    def _token(self, task: ef.Compute) -> int:
        if self.world.options.kind_of(task.step) is StepKind.VALUES:  # these cannot be checked
            return right(self.state or 0, task.step, task.vrank)
        return self.spoiling.token(self.state or 0, task.step, task.vrank)

    def _commit(self, step: int) -> None:
        total = self.total if self.total_step == step else None
        self.world.truth.steps.check_commit(self, step, total, self.world.now)
        self.open_step, self._busy = -1, True
        before, self.state = self.state, None
        optimizer_s = self.world.options.optimizer_s
        delay_s = self.world.rng.uniform(0.5, 1.5) * optimizer_s * self.slowness
        self.post(delay_s, self._exchange_updates, before, step, total)

    def _exchange_updates(self, before: int, step: int, total: int) -> None:
        if self.world.options.shard_optimizer:  # members send each other the shares they lack
            self.exchanges.meet("update", lambda: self._finish_update(before, step, total))
        else:
            self._finish_update(before, step, total)

    def _finish_update(self, before: int, step: int, total: int) -> None:
        self.state = apply(before, step, total)
        self.step = step + 1
        self._busy = False
        self.world.truth.steps.check_applied_state(self)
        if self.step >= self.until:
            self._leave_loop()
        elif self.world.options.rests_before(self.step):
            self._rest()
        else:
            self._open(self.step, whole=False, rested=False)
        self._run_script()

    def _finish_copy(self, order: ef.CopyState, began: float) -> None:
        """Continue once the state is copied, for any sink."""
        self._busy = False
        self.feed(self.mover.take_copy(order, began))
        self._run_script()

    def _leave_script_loop(self) -> None:
        self.world.truth.promises.record_loop_end(self.loop)
        if self.loop == len(self.world.options.loops):
            self.world.truth.check_script_end(self)
            self.end(0, reported=True)
        else:
            self._enter_loop()
