"""What the script's thread and the engine share of the step under way.

Its parts are filled by one of them and read by the other, under the driver's lock; nothing here
waits or decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.train.step.auditing import StepAudits
from holdfast.train.step.backup_agreement import Agreement
from holdfast.train.step.buckets import Gradients
from holdfast.train.step.clock import TaskClock
from holdfast.train.step.copies import Copies
from holdfast.train.step.reduction import Prints
from holdfast.train.step.step_table import Buffers, StepTable


class StepState:
    """What the script's thread and the engine share of a step, under the driver's lock."""

    def __init__(
        self, gradients: Gradients, table: StepTable, buffers: Buffers, clock: TaskClock
    ) -> None:
        self.clock = clock
        self.audits = StepAudits()
        self.gradients = gradients
        self.own = StepTable(len(table.rows), 0)  # the script writes here
        self.table = table  # and the engine here, for all workers
        self.buffers = buffers
        self.copies = Copies(gradients, self.own, buffers)
        self.copying = False  # the script computes a copy
        self.awaited: Callable[[], list[int]] = list  # ranks that are not done, as far as known
        self.prints: Prints = (0, 0)  # fingerprints of the state that the step begins with
        self.index: int | None = None  # the open step
        self.reduced_in = 0  # the view in which its gradient became complete
        self.done: set[int] = set()  # virtual ranks whose tasks are complete here
        self.agreement: Agreement | None = None  # of the present view, with backup workers

    def open(self, index: int) -> None:
        self.index = index
        self.done.clear()
        self.copies.forget()
        self.awaited = list
        self.clock.reset()
        self.table.used.zero_()

    @property
    def dropped(self) -> bool:
        """Whether it is known that what this worker computes of the open step does not count."""
        agreement, index = self.agreement, self.index
        return agreement is not None and index is not None and agreement.drops(index)

    def samples(self, hosted: Sequence[int]) -> int | None:
        """That these tasks have used; None until all of them are complete."""
        if not set(hosted) <= self.done:
            return None
        counts = self.own.counts()
        return sum(counts[vrank] for vrank in hosted)
