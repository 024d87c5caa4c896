"""Keeps speculative tasks: what others are late with, computed by a worker that waits for them.

If this worker comes to host their virtual ranks they are used as they are; if a late worker is done
first, what it has sent is compared with them. Used with the monitor held.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from holdfast.core.step.audit import Sketch
from holdfast.core.step.events import Digest
from holdfast.train.step.buckets import Gradients
from holdfast.train.step.reduction import BucketSum
from holdfast.train.step.row_sums import RowsSum
from holdfast.train.step.step_table import UNWEIGHTED, Buffers, StepTable


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTask:
    """Holds what a task leaves besides its gradient.

    `weight`: by which its loss, a sum, is to be divided; UNWEIGHTED if it is a mean. `left`: the
    buffers, for virtual rank 0. `gradient`: its digest, if an audit wants one; `bits` and `sketch`
    of a repeated task. `told`: names the records that it had to leave out.
    """

    loss: float
    count: int
    digest: int
    weight: float = UNWEIGHTED
    left: torch.Tensor | None = None
    gradient: Digest | None = None
    bits: int = 0
    sketch: Sketch = ()
    told: bytes = b""


class SpeculativeTasks:
    """The speculative tasks of the open step; their gradients are kept apart in the buckets."""

    def __init__(self, gradients: Gradients, table: StepTable, buffers: Buffers) -> None:
        self._gradients = gradients
        self._table = table
        self._buffers = buffers
        self._done: dict[int, FinishedTask] = {}  # by virtual rank

    def forget(self) -> None:
        """Forget the tasks, since another step begins, or the same one anew."""
        self._done.clear()

    def keep(self, vrank: int, task: FinishedTask) -> None:
        """Keep a task whose virtual rank another worker hosts."""
        self._done[vrank] = task

    def adopt(self, vrank: int, host: tuple[int, int]) -> bytes:
        """Use the speculative task as the task itself: this worker hosts its virtual rank now.

        Returns what is told of it.
        """
        task = self._done.pop(vrank)
        self._table.put(vrank, task.loss, task.count, task.digest, host, task.weight)
        if task.left is not None:
            self._buffers.keep(vrank, task.left)
        self._gradients.adopt(vrank)
        return task.told

    def contradicted(
        self, sums: Sequence[BucketSum | RowsSum], told: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return virtual ranks of which others have sent something else.

        Each member sees of a bucket only the piece that it sums, and of a virtual rank only what
        has not been added to another one's before. Nothing is said of those that have `told` of bad
        records, there or here: they were computed from other samples.
        """
        found = []
        for vrank in sorted(self._done):
            if vrank in told or self._done[vrank].told:
                continue
            leaves = self._gradients.copy_of(vrank)
            if any(not each.agrees(vrank, leaves) for each in sums):
                found.append(vrank)
        return tuple(found)
