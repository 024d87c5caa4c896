"""Offers a loop's steps epoch by epoch, also to a worker that joins in the middle of one.

All epochs of a loop are one loop to the job: the lines between two epochs are within that loop. So
a worker that joins enters the job's present epoch, and runs none of the lines of finished ones.
Only the lines above the epoch's steps are run again there: the values that workers have exchanged
in them are a part of the job's state, and no worker is asked for them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.script.job_step import Step, end_step, is_begun
from holdfast.engine.train.script.loop_ends import EndsWithEpoch
from holdfast.engine.train.script.script_thread import STATE_OF_EARLIER_LINE, ScriptThread


class Epoch:
    """Is one pass over the data: iterate over it, once, to go through its steps.

    `index`: its number, from 0. A worker that joins in the middle of it goes through the remaining
    steps.
    """

    def __init__(self, index: int, walk: EpochWalk, first: Step) -> None:
        self.index = index
        self._walk = walk
        self._first = first
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps of this epoch that the job has not taken yet. UserError if called twice.

        The lines after this loop still belong to the epoch: an evaluation, say.
        """
        if self._begun or self._walk.step is not self._first:
            raise UserError(
                f"the steps of epoch {self.index} can be gone through once, and before the next "
                "epoch: write `for step in epoch:` once in the body of the loop over job.epochs"
            )
        self._begun = True
        yield from self._walk.steps_of(self.index)


class EpochWalk:
    """Goes through the steps of one loop, epoch by epoch.

    `steps`: of the loop. `callbacks`: of the script, at the end of each step.
    """

    def __init__(
        self,
        script: ScriptThread,
        steps: Generator[Step, None, None],
        ends: EndsWithEpoch,
        callbacks: Sequence[Callable[[Step], None]],
    ) -> None:
        self.step: Step | None = None  # the newest step
        self._script = script
        self._steps = steps
        self._ends = ends
        self._callbacks = callbacks

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs from the job's present one on."""
        script = self._script
        try:
            self.step = next(self._steps, None)
            while self.step is not None:
                index, _ = self._ends.epoch_of(self.step.index)
                script.epoch_start.enter(script.number, index)
                yield Epoch(index, self, self.step)
                script.epoch_start.leave()
                self._end_epoch(index)
                self.step = next(self._steps, None)
        finally:
            self._steps.close()

    def steps_of(self, epoch: int) -> Iterator[Step]:
        """Yield the epoch's remaining steps; the next epoch begins with the job's next step."""
        self._script.epoch_start.leave()
        while self.step is not None:
            yield self.step
            end_step(self.step, self._callbacks)
            if self._is_last(self.step):
                return
            self.step = next(self._steps)
            if self._ends.epoch_of(self.step.index)[0] != epoch:
                self._script.start_again(STATE_OF_EARLIER_LINE)

    def _end_epoch(self, index: int) -> None:
        """End the epoch's last step, if that was left by `break`. UserError if it is another."""
        assert self.step is not None, "an epoch without a step"
        if not is_begun(self.step) or not self._is_last(self.step):
            raise UserError(
                f"epoch {index} was left early, at step {self.step.index}: go through all its "
                "steps, leave the loop over epochs by `break` as well, or call job.stop() to end "
                "all loops"
            )
        end_step(self.step, self._callbacks)

    def _is_last(self, step: Step) -> bool:
        """Return whether the epoch has no step after this one."""
        return self._script.progress.stopped or self._ends.ends_epoch(step.index)
