"""Copies: tasks that others are late with, computed by a worker that waits for them.

Which ones follows from who is late: those that this worker would get if the late ones were set
aside. If that comes to pass they are used as they are; if a late worker is done first, what it has
sent is compared with the copy. Under the lock that the script's thread and the engine share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.train.step.buckets import Gradients
from holdfast.train.step.reduction import BucketSum
from holdfast.train.step.step_table import Buffers, StepTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A task besides its gradient. `left`: the buffers, if it is that of virtual rank 0."""

    loss: float
    count: int
    digest: int
    left: torch.Tensor | None = None


class Copies:
    """Of the open step."""

    def __init__(self, gradients: Gradients, table: StepTable, buffers: Buffers) -> None:
        self._gradients = gradients
        self._table = table
        self._buffers = buffers
        self._done: dict[int, Done] = {}  # by virtual rank

    def __contains__(self, vrank: int) -> bool:
        return vrank in self._done

    def forget(self) -> None:
        """Another step begins, or the same one anew."""
        self._done.clear()

    def keep(self, vrank: int, done: Done) -> None:
        self._done[vrank] = done

    def adopt(self, vrank: int, host: tuple[int, int]) -> bool:
        """This worker hosts the virtual rank now: its copy is the task, if there is one."""
        copy = self._done.pop(vrank, None)
        if copy is None:
            return False
        self._gradients.adopt(vrank)
        self._table.put(vrank, copy.loss, copy.count, copy.digest, host)
        if copy.left is not None:
            self._buffers.keep(vrank, copy.left)
        return True

    def contradicted(self, sums: Sequence[BucketSum]) -> tuple[int, ...]:
        """Virtual ranks of which others have sent something else than these copies.

        Each member sees of a bucket only the piece that it sums, and of a virtual rank only what
        has not been added to another one's before.
        """
        found = []
        for vrank in sorted(self._done):
            leaves: Mapping[int, torch.Tensor] = self._gradients.copy_of(vrank)
            if any(not each.agrees(vrank, leaves[each.bucket.index]) for each in sums):
                found.append(vrank)
        return tuple(found)
