"""Decides where a loop over steps ends: at a step, or with an epoch.

A rule is asked about the script's next step, on every worker, and must give all of them the same
answer: it depends on the arguments of the call and on the job's state only.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.sources import LoopData


class LoopEnd(Protocol):
    """Decides when a loop is over. `step`: the script's next step."""

    def is_over(self, step: int) -> bool: ...

    def is_last(self, step: int) -> bool: ...

    def loads_until(self, step: int) -> int:
        """Return the step up to which batches may be loaded ahead."""
        ...

    def count_left(self, step: int) -> int:
        """Return how many steps the loop has from this one on."""
        ...

    def place(self, step: int) -> tuple[int, int] | None:
        """Return (epoch, step within it); None: the data's plan decides."""
        ...


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
        """Return the loop's end."""
        return self._until

    def count_left(self, step: int) -> int:
        """Return how many steps the loop has from this one on."""
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
        """Return how many steps the loop has from this one on, if later epochs are as long."""
        epoch, within = self.epoch_of(step)
        return (self._until - epoch) * self._length(epoch) - within

    def place(self, step: int) -> tuple[int, int]:
        """Return what `epoch_of` does."""
        return self.epoch_of(step)

    def _length(self, epoch: int) -> int:
        return self._data.epoch_steps(epoch) if self._steps is None else self._steps
