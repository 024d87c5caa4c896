"""Runs the script's own thread between `job.steps` and its end: the loops, and their ends.

A worker that joins passes the loops that the job has finished. All workers meet at a loop's end. A
rule for the end is asked about the script's next step, on every worker, and must give all of them
the same answer: it depends on the arguments of the call and on the job's state only.

A worker that joins in the middle of an epoch runs the lines above the epoch's steps again. Values
that workers have exchanged in these lines are a part of the job's state, so that no worker is asked
for them twice. Changes of the state in these lines are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.data.sample_digest import Facts
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import LoopData, Plan
from holdfast.engine.train.script.script_source import name_line
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.script.step_runner import PresentLoop, StepRunner
from holdfast.engine.train.step.driver import Driver
from holdfast.engine.train.step.mover import StateMover
from holdfast.engine.train.step.step_data import StepData

STATE_OF_EARLIER_LINE = (
    "it was given a state that belongs to an earlier line of the script, and runs that from its "
    "first line again"
)


class EndsAtStep:
    """Ends a loop before step number `until`."""

    def __init__(self, until: int) -> None:
        self._until = until

    def is_over(self, step: int) -> bool:
        """Return whether the loop has no such step."""
        return step >= self._until

    def is_last(self, step: int) -> bool:
        """Return whether no step follows this one."""
        return step == self._until - 1

    def loads_until(self, step: int) -> int:
        """Return the step up to which batches may be loaded ahead: the loop's end."""
        return self._until

    def count_left(self, step: int) -> int:
        """Return the number of steps of the loop from this one on."""
        return self._until - step

    def place(self, step: int) -> None:
        """Return None, since the data's plan decides."""


class EndsWithEpoch:
    """Ends a loop before epoch number `until`.

    `steps`: of each epoch, for data without epochs of their own; they are counted from the first
    step in which the data were used. UserError if the data have epochs and `steps` is given, or if
    the length of an epoch is unknown.
    """

    def __init__(self, data: LoopData, until: int, steps: int | None) -> None:
        if data.has_epochs and steps is not None:
            raise UserError(
                f"job.epochs(..., steps_per_epoch={steps}): these data have epochs of their own; "
                "leave it out"
            )
        if not data.has_epochs and (steps is None or steps < 1):
            raise UserError(
                f"job.epochs(..., steps_per_epoch={steps}): a stream, or a loop without data, has "
                "no epochs of its own; say how many steps make one, 1 or more"
            )
        self._data = data
        self._until = until
        self._steps = steps

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of the step that the job takes next, or is taking."""
        if self._steps is None:
            return self._data.epoch_of(step)
        return divmod(self._data.epoch_of(step)[1], self._steps)

    def ends_epoch(self, step: int) -> bool:
        """Return whether this step is its epoch's last."""
        epoch, within = self.epoch_of(step)
        return within + 1 == self._length(epoch)

    def is_over(self, step: int) -> bool:
        """Return whether the step belongs to an epoch that the loop does not have."""
        return self.epoch_of(step)[0] >= self._until

    def is_last(self, step: int) -> bool:
        """Return whether no step follows this one."""
        return self.epoch_of(step)[0] == self._until - 1 and self.ends_epoch(step)

    def loads_until(self, step: int) -> int:
        """Return the end of the epoch, or of the next one when half of this one is over.

        A sampler is not asked for epochs that are far ahead, or that the loop does not have.
        """
        epoch, within = self.epoch_of(step)
        length = self._length(epoch)
        end = step - within + length
        if 2 * within >= length and epoch + 1 < self._until:
            end += self._length(epoch + 1)
        return end

    def count_left(self, step: int) -> int:
        """Return the number of steps from this one on, if later epochs are as long."""
        epoch, within = self.epoch_of(step)
        return (self._until - epoch) * self._length(epoch) - within

    def place(self, step: int) -> tuple[int, int]:
        """Return the place of a step, as `epoch_of` does."""
        return self.epoch_of(step)

    def _length(self, epoch: int) -> int:
        return self._data.epoch_steps(epoch) if self._steps is None else self._steps


LoopEnd = EndsAtStep | EndsWithEpoch  # decides when a loop is over


class EpochStart:
    """Detects whether the script is above the first step of an epoch, and replays values there."""

    def __init__(self, progress: ScriptState, loaded: LoadedState) -> None:
        self._progress = progress
        self._loaded = loaded
        self._above = False  # the script is there
        #: Other workers have been there before, in this epoch.
        self._again = False
        #: The number of values that the script was given there.
        self._asked = 0

    @property
    def is_above(self) -> bool:
        """Return whether the script is in an epoch, and above its first step."""
        return self._above

    def enter(self, loop: int, epoch: int) -> None:
        """Begin an epoch, which this or another worker may have begun before."""
        self._above, self._asked = True, 0
        self._again = tuple(self._progress.epoch[:2]) == (loop, epoch)
        if not self._again:
            self._progress.epoch = loop, epoch, []

    def leave(self) -> None:
        """Record that the script reaches the epoch's steps, or leaves the epoch.

        If other workers have run the lines above before, what these lines have changed is set back.
        """
        if self._above and self._again:
            self._loaded.load_again()
        self._above = False

    def exchange(self, ask: Callable[[], bytes]) -> bytes:
        """Return the result of `ask`, or the former result above the epoch's steps."""
        if not self._above:
            return ask()
        told = self._progress.epoch[2]
        if not self._again:
            told.append(ask())
        elif self._asked >= len(told):
            raise UserError(
                f"a worker that has joined in epoch {self._progress.epoch[1]} calls job.evaluate "
                f"or job.agree before its steps more often than others have ({len(told)} times): "
                "the calls there must be the same on all workers"
            )
        self._asked += 1
        return told[self._asked - 1]


class ScriptThread:
    """Runs the job's loops as the machine orders."""

    def __init__(
        self, driver: Driver, data: StepData, steps: StepRunner, mover: StateMover
    ) -> None:
        self.steps = steps
        self.progress = steps.progress
        self.epoch_start = EpochStart(steps.progress, steps.guard.loaded)
        #: True also when the script has left a loop that is not over yet.
        self.in_loop = False
        #: The script is in the body of a loop.
        self.is_yielding = False
        self._driver = driver
        self._data = data
        self._guard = steps.guard
        self._recorder = steps.recorder
        self._mover = mover
        self._passed = False  # the loop that was left last was over before
        self._first: int | None = None  # the loop in which this worker has begun its first step

    # ------------------------------------------------------------ loops

    @property
    def number(self) -> int:
        """Return the number of the loop that was entered last, from 0."""
        return self.steps.loop.number

    def loop(self, data: LoopData, ends: LoopEnd) -> Iterator[tuple[int, Plan]]:
        """Yield the script's steps in one loop, starting from the job's present step."""
        self._enter_loop(data)
        progress = self.progress
        while self._wait_for_step(lambda: progress.stopped or ends.is_over(progress.steps)):
            self.steps.whole |= ends.is_last(progress.steps)
            self._driver.times.note_left(ends.count_left(progress.steps))
            self.is_yielding = True
            try:
                yield progress.steps, self.steps.loop.found_plan
            finally:
                self.is_yielding = False
            self.end_turn()
        self._driver.times.note_left(0)
        self.leave_loop()

    def end_turn(self) -> None:
        """Record that the script has finished a step, or has left the loop after it."""
        step, (counts, digests) = self.progress.steps, self.steps.marks
        data = self.steps.loop.data
        data.advance(step, counts, digests)
        if data.quarantine is not None:
            data.quarantine.settle(step)
        self.progress.steps = step + 1

    def leave_loop(self) -> None:
        """End the present loop, without waiting if it was over before the script reached it.

        A worker that joins passes such loops without waiting.
        """
        progress = self.progress
        self.in_loop = False
        self._passed = self.number < len(progress.ended)
        if self.steps.loop.plan is not None:
            self._recorder.end()
        if not self._passed:
            if self._first is not None and self._first < self.number:
                self._guard.loaded.load_again()  # it had no step before which to load it
            self._guard.loaded.forget()
            progress.ended.append(progress.steps)
            self._wait_for_release()

    def end_script(self) -> None:
        """Wait for the leader's end, as in a loop's end, also if the last loop was passed."""
        if self._passed:
            self._passed = False
            self._wait_for_release()
        self._driver.times.close()

    def _wait_for_release(self) -> None:
        """Wait for the other workers at a loop's end, and for saves that are under way."""
        driver, line = self._driver, name_line()
        driver.post(ev.LoopFinishing(line))
        view = driver.view
        if self._data.sharding is not None and view is not None:
            self._data.sharding.meet(view.rank(view.leader))
        driver.times.enter(TimeUse.END)
        self._mover.finish()
        self._recorder.wait()
        driver.post(ev.LoopEnded(line))
        while not isinstance(driver.next_for_script(), ef.Release):
            pass

    def exchange_once(self, data: LoopData, exchange: Callable[[], bytes]) -> bytes:
        """Exchange values between loops, in a loop of its own; return the exchanged bytes."""
        self._enter_loop(data)
        progress, number = self.progress, self.number
        if self._wait_for_step(lambda: number in progress.told):
            progress.told[number] = exchange()
        self.leave_loop()
        return progress.told[number]

    def _enter_loop(self, data: LoopData) -> None:
        self.in_loop = True
        self.steps.loop = PresentLoop(self.number + 1, data)
        self._driver.post(ev.LoopEntered(self._guard.is_exact))

    def _wait_for_step(self, ends: Callable[[], bool]) -> bool:
        """Wait at the boundary; return whether the loop has another step."""
        if self._first is not None:
            self._make_plan()
            if self._is_over(ends):
                return False
            if self._first < self.number:  # lines between loops may have changed the received state
                self._guard.loaded.load_again()
        driver = self._driver
        self.progress.trained.scatter()
        driver.post(ev.AtBoundary())
        next_order = partial(self._guard.next_order, driver)
        while not isinstance(order := self._recorder.rest(next_order), ef.Begin):
            if isinstance(order, ef.CopyState):
                self.progress.service.write()
                driver.post(self._mover.copy(order))
        self._first = self.number if self._first is None else self._first
        if self.number > len(self.progress.ended):
            self.steps.start_again(STATE_OF_EARLIER_LINE)
        self.steps.begin(order)
        self._make_plan()
        return not self._is_over(ends)

    def _make_plan(self) -> None:
        """Make the present loop's plan, once the number of steps before it is known."""
        loop = self.steps.loop
        if loop.plan is None:
            ended = self.progress.ended[: loop.number]
            plan = loop.data.begin(ended[-1] if ended else 0)
            if isinstance(plan, SamplePlan):
                plan = replace(plan, packed=self.progress.places.packed)
            loop.plan = plan
            _check_data(self._driver, self.progress, loop.number, loop.data.facts)
            self._recorder.begin(plan, loop.data.quarantine)

    def _is_over(self, ends: Callable[[], bool]) -> bool:
        return self.number < len(self.progress.ended) or ends()


def _check_data(driver: Driver, progress: ScriptState, loop: int, facts: Facts) -> None:
    """Compare a loop's data with those with which the job has begun it. UserError.

    The bits of a sample may depend on the kind of processor: a difference there is only logged.
    """
    name, text = progress.places.compare(loop, facts, driver.status().worker)
    if text and not name.startswith("sample "):
        raise UserError(text)
    if text and driver.leads:
        driver.post(ev.EventNoted("script", text))
