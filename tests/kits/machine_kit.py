"""Walks worker machines through views and steps: one of them, or several in lock-step.

The kit carries effects out as an engine and a script would, without any delay: it reports at once
what a machine has computed, and all members receive an exchange as soon as each has sent its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Purpose, Topic, WorkerEvent
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import Phase, WorkerStatus

E = TypeVar("E")


def a_view(
    number: int,
    workers: Sequence[int],
    step: int = 0,
    *,
    joiners: Sequence[int] = (),
    vranks: int = 0,
) -> View:
    """Return a view of these workers, which host the virtual ranks in turn; the first one leads."""
    owners = tuple(WorkerId(workers[v % len(workers)]) for v in range(vranks or len(workers)))
    return View(
        number=ViewNumber(number),
        members=tuple(
            Member(worker=WorkerId(w), incarnation=Incarnation(1), agent=AgentId("a"))
            for w in workers
        ),
        owners=owners,
        resume_step=step,
        leader=WorkerId(next((w for w in workers if w not in joiners), workers[0])),
        joiners=tuple(map(WorkerId, joiners)),
    )


class Walker:
    """Is one worker: its machine, and the orders that are not carried out yet."""

    def __init__(
        self, worker: int, policy: StepPolicy | None = None, *, exact: bool = False
    ) -> None:
        self.machine = WorkerMachine(WorkerId(worker), Incarnation(1), policy)
        self.now = 0.0
        self.done: list[ef.WorkerEffect] = []  # all effects, in order
        self.waiting: list[ef.WorkerEffect] = []  # effects that wait for the other members
        self.holds: Callable[[ef.Compute], bool] = lambda task: False  # whether a task takes long
        self.held: list[ef.Compute] = []
        self.digest: Callable[[int], int] = lambda vrank: 100 + vrank  # a task's digest
        self.feed(ev.LoopEntered(exact))
        self.feed(ev.AtBoundary())

    @property
    def status(self) -> WorkerStatus:
        """Return the worker's newest status."""
        return self.machine.snapshot()

    def feed(self, event: WorkerEvent) -> list[ef.WorkerEffect]:
        """Hand over one event, and carry out at once the effects that need no other member."""
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        self.done += effects
        for effect in effects:
            self._carry_out(effect)
        return effects

    def install(self, view: View) -> list[ef.WorkerEffect]:
        """Pass a view on, as the agent does."""
        return self.feed(ev.Directed(WorkerDirective(view=view)))

    def finish_held(self) -> None:
        """Finish the task that takes long."""
        task = self.held.pop(0)
        self._compute(task)

    def orders(self, kind: type[E]) -> list[E]:
        """Return all effects of a kind that it has been given so far."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    def take(self, kind: type[E]) -> E | None:
        """Take the first order of a kind that waits to be carried out."""
        found = next((each for each in self.waiting if isinstance(each, kind)), None)
        if found is not None:
            self.waiting.remove(found)  # type: ignore[arg-type]
        return found

    def _carry_out(self, effect: ef.WorkerEffect) -> None:
        match effect:
            case ef.Begin(step):
                self.feed(ev.StepOpened(step))
            case ef.Compute() if self.holds(effect):
                self.held.append(effect)
            case ef.Compute():
                self._compute(effect)
            case ef.CopyState(sink, step):
                self.feed(ev.StateCopied(sink, step))
            case ef.Abort():
                self.waiting.clear()
            case ef.Tell() | ef.Install() | ef.Commit():
                pass
            case _:
                self.waiting.append(effect)

    def _compute(self, task: ef.Compute) -> None:
        digest = self.digest(task.vrank) if task.digest else None
        self.feed(ev.TaskDone(task.step, task.vrank, task.purpose, 1, digest))


class Company:
    """Runs several workers in one view: all receive each message and result at once."""

    def __init__(
        self, workers: int, policy: StepPolicy | None = None, *, exact: bool = False
    ) -> None:
        self.walkers = [Walker(worker, policy, exact=exact) for worker in range(workers)]
        self.view: View
        self.summed: Callable[[int, ev.Summed], ev.Summed] = lambda rank, event: event
        self.stops_at: Topic | None = None  # the gather that hangs

    def enter(self, view: View) -> None:
        """Make all members install a view and connect."""
        self.view = view
        for walker in self.members:
            walker.waiting.clear()
            walker.install(view)
        for walker in self.members:
            walker.feed(ev.Connected(view.number))
        self.settle()

    @property
    def members(self) -> list[Walker]:
        """Return the walkers of the view, by rank."""
        return [self.walkers[worker] for worker in self.view.workers]

    def settle(self) -> None:
        """Run until a member waits for something that does not happen here."""
        while self._sync() or self._gather() or self._sum() or self._check():
            pass

    def until(self, step: int) -> None:
        """Take one step after the other, until `step` steps are committed."""
        for _ in range(step):
            for walker in self.members:
                if walker.status.phase is Phase.SCRIPT and walker.status.committed < step:
                    walker.feed(ev.AtBoundary())
            self.settle()
        reached = [walker.status.committed for walker in self.members]
        assert reached == [step] * len(reached), f"step {step} is not reached: {reached}"

    def _all_take(self, kind: type[E]) -> list[E]:
        if not all(any(isinstance(e, kind) for e in w.waiting) for w in self.members):
            return []
        found = [walker.take(kind) for walker in self.members]
        return [each for each in found if each is not None]

    def _sync(self) -> bool:
        if not self._all_take(ef.SyncState):
            return False
        for walker in self.members:
            if walker.status.worker in self.view.joiners:
                walker.feed(ev.Loading())
            walker.feed(ev.StatesCompared(self.view.number))
        return True

    def _gather(self) -> bool:
        for walker in self.members:
            first = next((e for e in walker.waiting if isinstance(e, ef.Gather)), None)
            if first is None or first.topic is self.stops_at:
                return False
        gathers = self._all_take(ef.Gather)
        topics = {each.topic for each in gathers}
        assert len(topics) == 1, f"members gather {topics} together"
        topic = gathers[0].topic
        # Members that report a fault add a fingerprint of their states.
        extra = (7,) if topic is Topic.REPORT_FAULT else ()
        rows = tuple((*each.row, *extra) for each in gathers)
        for walker in self.members:
            walker.feed(ev.Gathered(self.view.number, topic, rows))
        return True

    def _sum(self) -> bool:
        reduces = [
            next((e for e in w.waiting if isinstance(e, ef.Reduce)), None) for w in self.members
        ]
        shared = [any(isinstance(e, ef.ShareRows) for e in w.waiting) for w in self.members]
        if None in reduces or not all(shared):
            return False
        self._all_take(ef.Reduce)
        self._all_take(ef.ShareRows)
        for rank, (walker, reduce) in enumerate(zip(self.members, reduces, strict=True)):
            assert reduce is not None
            event = ev.Summed(view=reduce.view, step=reduce.step)
            walker.feed(self.summed(rank, event))
        return True

    def _check(self) -> bool:
        checks = self._all_take(ef.CheckSum)
        table = ((5, 5),) * len(self.members)
        for walker, check in zip(self.members, checks, strict=False):
            walker.feed(ev.SumChecked(check.view, check.bucket, table))
        return bool(checks)


def purposes(walker: Walker, purpose: Purpose) -> list[int]:
    """Return the virtual ranks that a worker was asked to compute for this purpose."""
    return [task.vrank for task in walker.orders(ef.Compute) if task.purpose is purpose]


def doubts(rank: int) -> Callable[[int, ev.Summed], ev.Summed]:
    """Report that one member found its piece of the sum not finite."""

    def summed(member: int, event: ev.Summed) -> ev.Summed:
        return dataclasses.replace(event, doubt=ev.Doubt.UNATTRIBUTED) if member == rank else event

    return summed
