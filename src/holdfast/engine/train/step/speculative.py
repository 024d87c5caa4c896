"""Keeps speculative tasks: copies of late tasks, computed by a worker that waits for them.

If this worker becomes the host of their virtual ranks, the results are used unchanged. If a late
worker finishes first, its results are compared with them. Used with the monitor held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.ground.events import Digest
from holdfast.engine.core.step.audit import Sketch
from holdfast.engine.train.step.bucket_sums import BucketSum
from holdfast.engine.train.step.gradients import Gradients
from holdfast.engine.train.step.row_sums import RowsSum
from holdfast.engine.train.step.step_table import UNWEIGHTED, Buffers, StepTable, TaskHost
from holdfast.engine.train.step.values import NOTHING, TaskReport, read_report


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTask:
    """Is a task's result besides its gradient.

    `weight`: divides its loss, a sum; UNWEIGHTED if the loss is a mean. `left`: the buffers, for
    virtual rank 0. `part`: 63 bits of a part of its gradient, for the ledger. `gradient`: its
    digest, if an audit wants one; `bits` and `sketch` of a repeated task. `report`: its report to
    all members.
    """

    loss: float
    count: int
    digest: int
    weight: float = UNWEIGHTED
    left: torch.Tensor | None = None
    part: int = 0
    gradient: Digest | None = None
    bits: int = 0
    sketch: Sketch = ()
    report: TaskReport = NOTHING

    def write(self, vrank: int, table: StepTable, buffers: Buffers, host: TaskHost) -> None:
        """Write the task's row, and keep its buffers."""
        table.put(vrank, self.loss, self.count, self.digest, host, self.weight, self.part)
        if self.left is not None:
            buffers.keep(vrank, self.left)


class SpeculativeTasks:
    """The speculative tasks of the open step; their gradients are kept apart in the buckets."""

    def __init__(self, gradients: Gradients, table: StepTable, buffers: Buffers) -> None:
        self._gradients = gradients
        self._table = table
        self._buffers = buffers
        self._done: dict[int, FinishedTask] = {}  # by virtual rank

    def forget(self) -> None:
        """Forget the tasks, since another step begins, or the same one again."""
        self._done.clear()

    def keep(self, vrank: int, task: FinishedTask) -> None:
        """Keep a task whose virtual rank another worker hosts."""
        self._done[vrank] = task

    def adopt(self, vrank: int, host: TaskHost) -> bytes:
        """Use the speculative task as the task itself: this worker hosts its virtual rank now.

        Returns its report, encoded.
        """
        task = self._done.pop(vrank)
        task.write(vrank, self._table, self._buffers, host)
        self._gradients.adopt(vrank)
        return task.report.encode()

    def contradicted_vranks(
        self,
        sums: Sequence[BucketSum | RowsSum],
        told: Mapping[int, bytes],
        parts: Sequence[int],
    ) -> tuple[int, ...]:
        """Return the virtual ranks for which another worker has sent another result.

        Each member sees only its received part of a virtual rank's own gradient, before it is
        added to another one. `told`: the reports of all. `parts`: digests of a part of the
        gradients of all virtual ranks; 0: not taken. Tasks that left out records, there or here,
        are not compared: they were computed from other samples.
        """
        found = []
        for vrank in sorted(self._done):
            mine, theirs = self._done[vrank].report, _read(told.get(vrank, b""))
            if mine.bad or (theirs is not None and theirs.bad):
                continue
            leaves = self._gradients.copy_of(vrank)
            part = self._done[vrank].part
            is_unlike = part and parts[vrank] and part != parts[vrank]
            if is_unlike or mine != theirs or any(not s.agrees(vrank, leaves) for s in sums):
                found.append(vrank)
        return tuple(found)


def _read(data: bytes) -> TaskReport | None:
    """Return a report; None for a damaged one, which equals no other."""
    try:
        return read_report(data)
    except WireError:
        return None
