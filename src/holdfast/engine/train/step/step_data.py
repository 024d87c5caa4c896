"""Shares a step between the script's thread and the engine: tensors, rows, digests.

One of them fills its parts and the other reads them, with the monitor held; no method
waits or decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.ground.events import Digest, StepKind
from holdfast.engine.core.step.audit import Sketch
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.checkpoint.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.step.bucket_sums import BucketSum
from holdfast.engine.train.step.gradient_digest import TaskDigest
from holdfast.engine.train.step.gradients import Gradients
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.reduction import NO_FINGERPRINTS, Act, StepFingerprints
from holdfast.engine.train.step.row_sums import RowsSum
from holdfast.engine.train.step.step_table import UNWEIGHTED, Buffers, StepTable, TaskHost
from holdfast.engine.train.step.time_sheet import TaskClock
from holdfast.engine.train.step.trained import Named
from holdfast.engine.train.step.values import NOTHING, StepValues, TaskReport, read_report


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
    """The speculative tasks of the open step; their gradients are kept apart in the buckets.

    They are copies of late tasks, computed by a worker that waits for them. If this worker becomes
    the host of their virtual ranks, the results are used unchanged. If a late worker finishes
    first, its results are compared with them. Used with the monitor held.
    """

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


@dataclass(frozen=True, slots=True)
class Opening:
    """Describes a step as its script opens it."""

    act: Act = field(default_factory=Act)
    #: Fingerprints of the state that the step begins with.
    fingerprints: StepFingerprints = NO_FINGERPRINTS
    #: This worker's script wants the loop to end.
    stops: bool = False


class StepData:
    """Keeps a worker's open step; the table and the reduced buckets are of the whole job."""

    def __init__(
        self,
        gradients: Gradients,
        table: StepTable,
        buffers: Buffers,
        clock: TaskClock,
        digest: TaskDigest,
        attributes: ModuleAttributes | None = None,
        sharding: ShardedOptimizers | None = None,
    ) -> None:
        self.gradients = gradients
        #: The engine writes here, for all workers.
        self.table = table
        #: The script writes here.
        self.own = StepTable(len(table.rows), 0)
        self.buffers = buffers
        self.clock = clock
        self.digest = digest
        self.attributes = attributes or ModuleAttributes([])
        self.speculative = SpeculativeTasks(gradients, self.own, buffers)
        self.values = StepValues()
        #: This worker's script wants the loop to end.
        self.wants_stop = False
        #: The view in which its gradient became complete.
        self.reduced_in = 0
        #: This worker makes the job's calls for the step. At most one member does.
        self.acts = False
        #: The leader of the first view in which this worker gave all of its parts of the open
        #: step. It may have the sum, and may have made the calls, even if other members lack it.
        self._first_leader: WorkerId | None = None
        #: Shares out the optimizers' state among the members.
        self.sharding = sharding
        self._opening = Opening()

    def replan(self, trained: Iterable[Named], by_row: Iterable[Iterable[torch.Tensor]]) -> None:
        """Sum the gradients of other parameters from now on. Between two steps."""
        self.gradients.replan(trained, by_row)
        self.table.expect(len(self.gradients.used))
        self.buffers.find()

    @property
    def kind(self) -> StepKind:
        """Return the kind of the open step."""
        return self.act.kind

    @property
    def act(self) -> Act:
        """Return the act of the open step."""
        return self._opening.act

    @property
    def fingerprints(self) -> StepFingerprints:
        """Return the fingerprints of the state that the step begins with."""
        return self._opening.fingerprints

    def open(self, act: Act, fingerprints: StepFingerprints) -> None:
        """Begin a step; its gradients and buffers have been reset."""
        self._opening = Opening(act, fingerprints, self.wants_stop)
        self.values.reset()
        self._first_leader = None
        self.reset()

    def reset(self) -> None:
        """Forget this worker's results of the step, except gradients."""
        self.speculative.forget()
        self.clock.reset()
        self.table.used.zero_()
        self.table.stops = self._opening.stops

    def digest_sum(self, step: int) -> int:
        """Return 63 bits of a part of the step's sum, which the script has not touched yet.

        `step`: the number of the job's step. 0: not taken.
        """
        parts = [(bucket.index, bucket.result.data) for bucket in self.gradients.active]
        for table in self.gradients.active_tables:
            parts += [(table.index, table.result.places), (table.index, table.result.values)]
        return self.digest.part_of(step, parts)

    def record_given(self, leader: WorkerId) -> None:
        """Record that all parts of this worker are under way, in a view with this leader."""
        if self._first_leader is None:
            self._first_leader = leader

    def record_reduced(self, view: int, *, leader: WorkerId | None = None) -> None:
        """Record that the step's gradient is complete, by an exchange in this view.

        `leader`: this worker, if it is that view's leader. A worker that missed the exchange was
        not. A leader makes no calls if an earlier leader may have made them.
        """
        self.reduced_in = view
        self.acts = leader is not None and self._first_leader in (None, leader)
