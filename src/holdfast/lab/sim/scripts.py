"""Simulates the script of one worker: its loop, its tasks and its updates.

It does what the machine orders, one thing after the other, and reports to it. All times are drawn
from the world's seed.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Protocol

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Purpose, StepKind
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.step.audit import FICKLE, RUNS_DISPUTED
from holdfast.lab.sim.arithmetic import apply
from holdfast.lab.sim.arithmetic import task as right
from holdfast.lab.sim.endings import SCRIPT_FAILED
from holdfast.lab.sim.exchanges import Exchanges, ExchangeWorld
from holdfast.lab.sim.seams import Actor, ScriptWork
from holdfast.lab.sim.simulated_mover import SimulatedMover
from holdfast.lab.sim.wrong_bits import Violation


class ScriptProcess(Actor, Protocol):
    """Is the process in which a script runs."""

    @property
    def exchanges(self) -> Exchanges: ...

    @property
    def mover(self) -> SimulatedMover: ...

    def end(
        self,
        code: int,
        detail: str = "",
        *,
        reported: bool = False,
        error: MachineError | None = None,
    ) -> None: ...


class SimulatedScript:
    """Does one thing after the other, as the machine orders; `work` has its results."""

    def __init__(self, process: ScriptProcess, world: ExchangeWorld) -> None:
        self.work = ScriptWork()
        self._process = process
        self._world = world
        self._orders: deque[ef.ScriptEffect] = deque()
        self._is_copying = False  # it computes a speculative task
        self._is_doing = False  # it computes a task, applies a step or copies its share

    @property
    def is_busy(self) -> bool:
        """Return whether its script is computing, or has tasks to compute."""
        return self._is_doing or bool(self._orders)

    @property
    def can_wait(self) -> bool:
        """Return whether its tasks no longer count, or follow a speculative one."""
        if self._is_copying:
            return True
        view, step = self._process.exchanges.view, self._process.machine.snapshot().committed
        ranks = (
            self._world.truth.steps.counted.get((view.number, step)) if view is not None else None
        )
        return ranks is not None and self._process.exchanges.rank not in ranks

    @property
    def until(self) -> int:
        """Return the step at which the present loop of its script ends."""
        options = self._world.options
        end = options.loops[max(self.work.loop, 1) - 1]
        return (
            min(end, options.parts_at)
            if not self._process.worker and options.parts_at >= 0
            else end
        )

    def order(self, effect: ef.ScriptEffect) -> None:
        """Take an order in, after the earlier ones."""
        self._orders.append(effect)
        self.run()

    def commit(self, effect: ef.Commit) -> None:
        """Take in the commit of its step: its tasks that have not begun are cancelled."""
        kept = [each for each in self._orders if not isinstance(each, ef.Compute)]
        self._orders = deque([*kept, effect])

    def enter_loop(self) -> None:
        """Begin the next loop."""
        self.work.loop += 1
        self._process.feed(ev.LoopEntered(self._world.options.exact_bits))
        if self.work.step >= self.until and self._process.machine.snapshot().has_state:
            self._leave_loop()
        else:
            self._rest()

    def _leave_loop(self) -> None:
        """Leave the loop: a leader that shares the state waits until all have theirs."""
        feed = self._process.feed
        feed(ev.LoopFinishing())
        shares = self._world.options.shard_optimizer
        leads = shares and self._process.machine.leads(self._process.host.clock())
        if shares:
            end = partial(feed, ev.LoopEnded()) if leads else lambda: None
            self._process.exchanges.meet("end", end)
        if not leads:
            feed(ev.LoopEnded())

    def _rest(self) -> None:
        self.work.at_rest = True
        self._process.feed(ev.AtBoundary())

    def run(self) -> None:
        """Do what the machine wants of the script, one thing after the other."""
        while self._orders and not self._is_doing and self._process.alive:
            self._do_in_script(self._orders.popleft())

    def _do_in_script(self, effect: ef.ScriptEffect) -> None:
        world = self._world
        match effect:
            case ef.Begin(step, whole):
                self._begin(step, whole)
            case ef.Compute() if world.truth.rows.are_lost(self._process.machine.snapshot().view):
                world.truth.count["rows found lost"] += 1
                self._is_doing = True  # it waits for its end, as no task can read its rows
                self._process.feed(ev.StateLost())
            case ef.Compute():
                self._is_doing = True
                self._is_copying = effect.purpose is Purpose.SPECULATIVE
                spread = world.options.task_spread
                share = world.rng.uniform(1 - spread, 1 + spread)
                delay_s = share * world.options.task_s * self._process.health.slowness
                timed = world.options.kind_of(effect.step) is StepKind.GRADIENTS
                if effect.purpose is Purpose.HOSTED and timed:
                    self.work.compute_us += int(delay_s * 1e6)
                self._process.post(delay_s, self._finish_task, effect)
            case ef.Commit(step=step):
                self._commit(step)
            case ef.CopyState():
                self._is_doing = True
                delay_s = world.delay(world.options.load_s) / 4
                self._process.post(delay_s, self._finish_copy, effect, world.now)
            case ef.Release(_):
                self._process.post(world.delay(0.001), self._leave_script_loop)

    def _begin(self, step: int, whole: bool) -> None:
        self.work.at_rest = False
        self._world.truth.steps.check_beginning(self._process)
        if step >= self.until:
            self._leave_loop()
            return
        if not self._world.options.rests_before(step):
            raise Violation(
                f"worker {self._process.key} begins step {step}, which follows no boundary"
            )
        self._open(step, whole, rested=True)

    def _open(self, step: int, whole: bool, *, rested: bool) -> None:
        self.work.open_step, self.work.whole = step, whole or step == self.until - 1
        self.work.tokens, self.work.copies, self.work.compute_us = {}, {}, 0
        self._world.truth.steps.check_opening(self._process, step)
        self._process.feed(ev.StepOpened(step, self._world.options.kind_of(step), rested))

    def _finish_task(self, task: ef.Compute) -> None:
        if self._process.health.stuck:
            self._process.post(0.25, self._finish_task, task)
            return
        self._is_doing = self._is_copying = False
        if self._world.options.fails_in == task.step:
            self._world.truth.count["failed"] += 1
            by_machine = self._world.options.fails_by_machine
            self._process.end(
                1, SCRIPT_FAILED, error=MachineError.DISK_FULL if by_machine else None
            )
            return
        if task.step == self.work.open_step and self.work.step == self.work.open_step:
            token = told = self._token(task)
            if task.purpose is Purpose.HOSTED:
                self.work.tokens[task.vrank] = token
            elif task.purpose is Purpose.SPECULATIVE:
                self.work.copies[task.vrank] = token
                self._world.truth.count["copied"] += 1
            if task.disputed and self._world.options.exact_bits:
                again = {self._token(task) for _ in range(RUNS_DISPUTED - 1)}
                told = token if again == {token} else FICKLE
            digest = told if task.digest else None
            self._process.feed(ev.TaskDone(task.step, task.vrank, task.purpose, 1, digest))
        self.run()

    def _token(self, task: ef.Compute) -> int:
        if self._world.options.kind_of(task.step) is StepKind.VALUES:  # these cannot be checked
            return right(self.work.state or 0, task.step, task.vrank)
        return self._process.spoiling.token(self.work.state or 0, task.step, task.vrank)

    def _commit(self, step: int) -> None:
        total = self.work.total if self.work.total_step == step else None
        self._world.truth.steps.check_commit(self._process, step, total, self._world.now)
        self.work.open_step, self._is_doing = -1, True
        before, self.work.state = self.work.state, None
        optimizer_s = self._world.options.optimizer_s
        delay_s = self._world.rng.uniform(0.5, 1.5) * optimizer_s * self._process.health.slowness
        self._process.post(delay_s, self._exchange_updates, before, step, total)

    def _exchange_updates(self, before: int, step: int, total: int) -> None:
        if self._world.options.shard_optimizer:  # members send each other the shares they lack
            self._process.exchanges.meet("update", lambda: self._finish_update(before, step, total))
        else:
            self._finish_update(before, step, total)

    def _finish_update(self, before: int, step: int, total: int) -> None:
        self.work.state = apply(before, step, total)
        self.work.step = step + 1
        self._is_doing = False
        self._world.truth.steps.check_applied_state(self._process)
        if self.work.step >= self.until:
            self._leave_loop()
        elif self._world.options.rests_before(self.work.step):
            self._rest()
        else:
            self._open(self.work.step, whole=False, rested=False)
        self.run()

    def _finish_copy(self, order: ef.CopyState, began: float) -> None:
        """Continue once the state is copied, for any sink."""
        self._is_doing = False
        self._process.feed(self._process.mover.take_copy(order, began))
        self.run()

    def _leave_script_loop(self) -> None:
        self._world.truth.promises.record_loop_end(self.work.loop)
        if self.work.loop == len(self._world.options.loops):
            self._world.truth.check_script_end(self._process)
            self._process.end(0, reported=True)
        else:
            self.enter_loop()
