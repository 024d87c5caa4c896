"""One simulated worker process: its script, its control thread and the driver of its machine.

It mirrors the real driver: the machine decides, and this carries out. A process can be stopped (it
handles nothing until it is resumed), silent (the same, but its counters move), or end at any point,
also between two effects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.core.step.audit import Audit, owed
from holdfast.core.step.trust import Trust
from holdfast.core.step.worker import (
    Abort,
    AtBoundary,
    Begin,
    Commit,
    Copied,
    Directed,
    Install,
    LocalDone,
    LoopEnded,
    LoopEntered,
    Release,
    Saved,
    Speculate,
    Tell,
    Tick,
    Voted,
    WorkerEffect,
    WorkerEvent,
)
from holdfast.core.types import (
    Incarnation,
    ViewNumber,
    WorkerDirective,
    WorkerId,
    WorkerStatus,
)
from holdfast.sim import audits
from holdfast.sim import data_network as exchange
from holdfast.sim.checkers import INITIAL_STATE, Copy, Key, apply, task

if TYPE_CHECKING:
    from holdfast.sim.data_network import Group
    from holdfast.sim.hosts import AgentHost
    from holdfast.sim.world import World


class Process:
    """A process of one incarnation of a worker. `state` is None while it is being written."""

    def __init__(
        self, world: World, host: AgentHost, worker: WorkerId, incarnation: Incarnation
    ) -> None:
        self.world = world
        self.host = host
        self.agent = host.name
        self.worker = worker
        self.key: Key = (int(worker), int(incarnation))
        self.machine = world.machines.worker(worker, incarnation, world.options.patience)
        self.alive = True
        self.stopped = False  # by a signal: the kernel shows state T
        self.silent = False  # in foreign code that holds the interpreter lock
        self.paused = False  # by its agent
        self.stuck = False  # the main thread never comes back
        self.ailing = False  # stuck or very slow at some time: it may count as hung
        self.slowness = 1.0
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.state: int | None = INITIAL_STATE
        self.step = 0  # steps applied to `state`
        self.at_rest = False  # the script is held between two steps
        self.computing = False
        self.in_step = False
        self.local_done = False  # its own tasks
        self.done_said = False  # these, and what it audits
        self.tokens: dict[int, int] = {}
        self.audits: tuple[Audit, ...] = ()
        self.audited: dict[int, int] = {}  # tokens of others
        self.copying = -1  # the step of which it may copy what others are late with
        self.copies: dict[int, int] = {}  # tokens of those
        self.trust = Trust(world.options.cycle)
        self.flipped: int | None = None  # the part of its state in which a bit is wrong
        self.lies = 0  # what it adds to its tokens; negative: each time something else
        self.lies_once = False
        self.lied_in = -1  # the last step in which it did
        self.mistakes = 0
        self.compute_us = 0  # of the step's tasks so far
        self.kept: dict[int, exchange.Share] = {}  # sums of steps that others may have missed
        self.total: int | None = None
        self.total_step = -1
        self.loop = 0
        self.group: Group | None = None
        self.last_step_of = -1  # the view whose vote announced a planned change
        self.cut_through = -1  # what was sent in views up to this and has not arrived is lost
        self._events: deque[WorkerEvent] = deque()
        self._feeding = False
        self._poked = False
        self._channel_free = 0.0
        self._wake_at: float | None = None

    # ------------------------------------------------------------ life

    def start(self) -> None:
        options = self.world.options
        self.post(self.world.rng.uniform(0.5, 1.5) * options.boot_s, self._enter_loop)
        self.post(self.world.rng.uniform(0.0, options.heartbeat_s), self._heartbeat)

    def post(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have this process do something later, if it still lives then."""
        self.world.at(delay_s, self.deliver, call, args)

    def deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if not self.running:
            self.backlog.append((call, args))
            return
        call(*args)

    @property
    def running(self) -> bool:
        return not (self.stopped or self.silent or self.paused)

    def resume(self) -> None:
        """No longer frozen: what piled up is handled at once, unless its agent paused it."""
        self.stopped = self.silent = False
        self.wake()

    def wake(self) -> None:
        while self.backlog and self.alive and self.running:
            call, args = self.backlog.popleft()
            call(*args)

    def end(self, code: int, detail: str = "") -> None:
        """The process is gone at this very moment; its agent hears of it a little later."""
        if not self.alive:
            return
        self.alive = False
        self.world.ended(self)
        if self.group is not None:
            self.world.data.close(self, self.group, "peer died")
        self.host.process_ended(self, code, detail)

    def open_group(self, number: int) -> Group | None:
        group = self.group
        return group if group is not None and group.number == number and group.open else None

    # ------------------------------------------------------------ the machine's driver

    def feed(self, event: WorkerEvent) -> None:
        """Hand one event to the machine and carry out its effects, in order, to the end."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        while self._events and self.alive:
            event = self._events.popleft()
            before = self.machine.snapshot().view
            effects = self.machine.handle(event, self.host.clock())
            self.world.note(self, event, effects)
            self.machine.check()
            for effect in effects:
                if self.alive and not self.world.faults.strikes_inside(self):
                    self._carry_out(effect, event, before)
            if self.alive:
                self.world.truth.acted(self)
        self._feeding = False
        self._arm()
        if self._poked and self.alive:
            self._poked = False
            exchange.advance(self)

    def _arm(self) -> None:
        """Wake the machine when it wants to be; the control thread looks ten times a second."""
        deadline = self.machine.deadline()
        if deadline is None or deadline == float("inf") or not self.alive:
            return
        at = self.host.world_time(deadline) + self.world.rng.uniform(0.0, 0.1)
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self.post(max(at - self.world.now, 0.0), self._woken, at)

    def _woken(self, at: float) -> None:
        if self._wake_at == at:
            self._wake_at = None
            self.feed(Tick())

    def _carry_out(self, effect: WorkerEffect, event: WorkerEvent, before: int) -> None:
        match effect:
            case Tell(status):
                self._tell(status)
            case Abort(number):
                group = self.group
                if group is not None and group.number <= number:
                    self.world.data.close(self, group, "peer aborted")
                    audits.leave(self, group)
            case Install(view):
                self.world.truth.installed(self, view, before)
                exchange.install(self, view)
                self.copying = -1
                self._compute()
            case Commit(step):
                self._commit(step, isinstance(event, Voted))
            case Begin(step):
                self._begin(step)
            case Speculate(step):
                self.copying = step
                self._compute()
            case Release(_):
                self.post(self.world.delay(0.001), self._released)

    def directed(self, directive: WorkerDirective) -> None:
        self.feed(Directed(directive))

    def _tell(self, status: WorkerStatus) -> None:
        """Over the channel to the agent, which keeps order."""
        world = self.world
        at = max(world.now + world.delay(world.options.channel_s), self._channel_free)
        self._channel_free = at
        world.at(at - world.now, self.host.worker_said, self, status)

    def _heartbeat(self) -> None:
        self._tell(self.machine.snapshot())
        self.post(self.world.options.heartbeat_s, self._heartbeat)

    # ------------------------------------------------------------ the script

    def _enter_loop(self) -> None:
        self.loop += 1
        self.feed(LoopEntered())
        if self.step >= self.until and self.machine.snapshot().has_state:
            self.feed(LoopEnded())
        else:
            self.at_rest = True
            self.feed(AtBoundary())

    @property
    def until(self) -> int:
        return self.world.options.loops[max(self.loop, 1) - 1]

    def _begin(self, step: int) -> None:
        self.at_rest = False
        self.world.truth.begun(self)
        if step >= self.until:
            self.feed(LoopEnded())
            return
        self.in_step = True
        self.local_done = self.done_said = False
        self.tokens, self.audited, self.copies = {}, {}, {}
        self.compute_us = 0
        self.plan_audits()
        self._compute()

    def plan_audits(self) -> None:
        """Of the step under way, in the present view."""
        self.audits = audits.planned(self) if self.in_step else ()

    def owed(self) -> list[int]:
        """Virtual ranks of others that it has yet to compute."""
        return owed(self.audits, self.worker, self.audited)

    def redo(self, again: tuple[Audit, ...]) -> None:
        """Compute the step from its beginning."""
        self.tokens, self.audited, self.copies, self.audits = {}, {}, {}, again
        self._compute()

    def _compute(self) -> None:
        """Start the next missing task of this step, or say that there is none."""
        view = self.machine.view
        if not self.in_step or view is None:
            return
        hosted = self.machine.snapshot().hosted
        for vrank in hosted:
            if vrank in self.copies:
                self.tokens.setdefault(vrank, self.copies.pop(vrank))
        missing = [v for v in hosted if v not in self.tokens]
        self.local_done = not missing
        if self.computing:
            return
        todo = missing or self.owed()
        if bool(todo) == self.done_said:
            self.done_said = not todo
            self.copying = -1
            self.feed(LocalDone(self.done_said))
        if todo:
            self._run(todo[0], self.tokens if missing else self.audited)
        elif self.copying == self.step and (late := exchange.late_tasks(self)):
            self._run(late[0], self.copies)
        self._poked = True

    def _run(self, vrank: int, tokens: dict[int, int]) -> None:
        self.computing = True
        world = self.world
        delay_s = world.rng.uniform(0.5, 1.5) * world.options.task_s * self.slowness
        self.compute_us += int(delay_s * 1e6) if tokens is self.tokens else 0
        self.post(delay_s, self._computed, vrank, tokens)

    def _computed(self, vrank: int, tokens: dict[int, int]) -> None:
        if self.stuck:
            self.post(0.25, self._computed, vrank, tokens)
            return
        self.computing = False
        if not self.in_step:
            return
        tokens[vrank] = self._token(vrank)
        if tokens is self.copies:
            self.feed(Copied())
        self._compute()
        exchange.advance(self)

    def _token(self, vrank: int) -> int:
        token = task(self.state or 0, self.step, vrank)
        if self.flipped is not None:
            token = hash((token, self.flipped, 41))
        if self.lies or self.lies_once:
            self.lies_once, self.lied_in = False, self.step
            token += self.lies if self.lies > 0 else self.world.rng.randint(1, 1000)
        return token

    def _commit(self, step: int, by_vote: bool) -> None:
        total = self.total if self.total_step == step else None
        self.world.truth.committed(self, step, total, by_vote)
        self.in_step = self.local_done = self.done_said = False
        before, self.state = self.state, None
        optimizer_s = self.world.options.optimizer_s
        delay_s = self.world.rng.uniform(0.5, 1.5) * optimizer_s * self.slowness
        self.post(delay_s, self._applied, before, step, total)

    def _applied(self, before: int, step: int, total: int) -> None:
        self.state = apply(before, step, total)
        self.step = step + 1
        self.world.truth.applied(self)
        every = self.world.options.save_every
        if every and self.step % every == 0 and self.machine.leads(self.host.clock()):
            copy = self.state, self.flipped
            view = ViewNumber(self.machine.snapshot().view)
            delay_s = self.world.delay(self.world.options.load_s)
            self.post(delay_s, self._saved, self.step, copy, view)
        if self.step >= self.until:
            self.feed(LoopEnded())
        else:
            self.at_rest = True
            self.feed(AtBoundary())
        exchange.advance(self)  # it may have caught up

    def _saved(self, step: int, copy: Copy, view: ViewNumber) -> None:
        """The checkpoint of a step is durable; it counts once others have the same state."""
        if self.world.options.cycle and self.machine.snapshot().committed <= step < self.until:
            self.post(self.world.options.load_s, self._saved, step, copy, view)
            return
        self.world.truth.save(step, copy, view)
        self.feed(Saved(step, view))

    def _released(self) -> None:
        if self.loop == len(self.world.options.loops):
            self.world.truth.left(self)
            self.end(0)
        else:
            self._enter_loop()
