"""Shares a step between the script's thread and the engine: tensors, rows, digests.

One of them fills its parts and the other reads them, with the monitor held; nothing here waits or
decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.engine.core.ground.events import StepKind
from holdfast.engine.train.optimizer_sharding.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.step.act import Act
from holdfast.engine.train.step.buckets import Gradients
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.reduction import Prints
from holdfast.engine.train.step.speculative import SpeculativeTasks
from holdfast.engine.train.step.step_table import Buffers, StepTable
from holdfast.engine.train.step.task_clock import TaskClock
from holdfast.engine.train.step.task_digest import TaskDigest
from holdfast.engine.train.step.trained import Named
from holdfast.engine.train.step.values import StepValues


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
    ) -> None:
        self.gradients = gradients
        self.table = table  # the engine writes here, for all workers
        self.own = StepTable(len(table.rows), 0)  # the script writes here
        self.buffers = buffers
        self.clock = clock
        self.digest = digest
        self.attributes = attributes or ModuleAttributes([])
        self.speculative = SpeculativeTasks(gradients, self.own, buffers)
        self.values = StepValues()
        self.act = Act()
        self.wants_stop = False  # this worker's script wants the loop to end
        self._stops = False  # the value of `wants_stop` when the step was opened
        self.prints: Prints = (0, 0, 0, 0)  # fingerprints of the state that the step begins with
        self.reduced_in = 0  # the view in which its gradient became complete
        self.acts = False  # this worker was that view's leader: exactly one member was
        # shares out the optimizers' state among the members
        self.sharding: ShardedOptimizers | None = None

    def replan(self, trained: Iterable[Named], by_row: Iterable[Iterable[torch.Tensor]]) -> None:
        """Sum the gradients of other parameters from now on. Between two steps."""
        self.gradients.replan(trained, by_row)
        self.table.expect(len(self.gradients.used))
        self.buffers.find()

    @property
    def kind(self) -> StepKind:
        """Return the kind of the open step."""
        return self.act.kind

    def open(self, act: Act, prints: Prints) -> None:
        """Begin a step; its gradients and buffers have been reset."""
        self.act, self.prints, self._stops = act, prints, self.wants_stop
        self.values.reset()
        self.reset()

    def reset(self) -> None:
        """Forget this worker's results of the step, except gradients."""
        self.speculative.forget()
        self.clock.reset()
        self.table.used.zero_()
        self.table.stops = self._stops

    def digest_sum(self, step: int) -> int:
        """Return 63 bits of a part of the step's sum, which the script has not touched yet.

        `step`: the number of the job's step. 0: not taken.
        """
        parts = [(bucket.index, bucket.result.data) for bucket in self.gradients.active]
        for table in self.gradients.active_tables:
            parts += [(table.index, table.result.places), (table.index, table.result.values)]
        return self.digest.part_of(step, parts)

    def record_reduced(self, view: int, *, leads: bool = False) -> None:
        """Record that the step's gradient is complete, by an exchange in this view.

        `leads`: this worker is that view's leader. A worker that missed the exchange was not.
        """
        self.reduced_in, self.acts = view, leads
