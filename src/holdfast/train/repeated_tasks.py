"""Computes a task twice now and then, on the same worker, to see that it is a pure function.

A worker repeats its first task, and later one task of the job in so many steps. What differs then
depends on something that is not keyed by the task: on what was computed before it, on a generator
of the script's own, or on chance in kernels. A third run tells that from a passing machine fault.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from holdfast.core.errors import UserError, WorldError
from holdfast.core.step.audit import Sketch, near

ATTEMPTS = 4  # at most, of one task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMark:
    """Says what a run of a task has used and come to; 0 for a batch that cannot be digested."""

    batch: int
    result: int
    sketch: Sketch = ()  # of the gradient, where it was asked for
    told: bytes = b""  # of records that could not be read


class RepeatedTasks:
    """Knows which tasks are repeated, and judges what came out.

    `cycle`: steps in which one task is repeated; 0: none ever is. `tolerance`: by how much of its
    norm a gradient may differ where kernels are not deterministic.
    """

    def __init__(
        self, cycle: int, vranks: int, tolerance: float, tell: Callable[[str], None]
    ) -> None:
        self._cycle = cycle
        self._vranks = vranks
        self._tolerance = tolerance
        self._tell = tell
        self._first = True  # this worker has repeated no task yet
        self._noisy = False  # kernels are not deterministic, which was told

    def due(self, step: int, vrank: int) -> bool:
        """Tell whether this task is to be repeated."""
        if not self._cycle or self._noisy:
            return False
        turn, within = divmod(step, self._cycle)
        due = self._first or (within == 0 and turn % self._vranks == vrank)
        self._first = False
        return due

    def decides(self, runs: list[RunMark], task: str) -> bool:
        """Judge the runs of a task so far, the first of which counts; False: one more is needed.

        UserError if the task is no function of its inputs; WorldError if the run that counts was
        wrong.
        """
        counts, *others = runs
        if any(each.told != counts.told for each in others):
            return True  # a record has come or gone between them, which is no fault of the script
        if any(_agree(counts, each) for each in others):
            return True
        if len(runs) < ATTEMPTS - 1:
            return False
        if len(others) > 1 and _agree(others[0], others[1]):
            if others[0].batch != counts.batch:
                raise UserError(_other_batch(task))
            raise WorldError(
                f"{task} was computed wrongly here once, and rightly twice after that: this worker "
                "leaves"
            )
        if len({each.batch for each in runs}) > 1:
            raise UserError(_other_batch(task))
        if len(runs) < ATTEMPTS:
            return False
        if not near(others[-2].sketch, others[-1].sketch, self._tolerance):
            raise UserError(
                f"{task} came to another gradient each time that this worker computed it: a task "
                "must depend on nothing but the parameters, its batch and the global random "
                "generators; keep what changes from task to task (counters, hidden states, running "
                "averages, generators) out of it, or in buffers and job.values"
            )
        self._noisy = True
        self._tell(
            f"{task} came to slightly other bits each time that a worker computed it: results are "
            "exact up to that noise only; use torch.use_deterministic_algorithms(True), and keep "
            "what changes from task to task out of the loss"
        )
        return True


def result_print(loss: float, weight: float, gradient: int) -> int:
    """Return 64 bits of what a task has come to."""
    return xxhash.xxh3_64_intdigest(struct.pack("<2dQ", loss, weight, gradient))


def _agree(one: RunMark, other: RunMark) -> bool:
    return one.batch == other.batch and one.result == other.result


def _other_batch(task: str) -> str:
    return (
        f"{task} got another batch when the dataset was asked again for the same samples: "
        "derive a sample from its index and from the global generators of Python, NumPy and torch, "
        "which are keyed by the task; not from generators or counters of the dataset's own, of its "
        "transforms' or collate_fn's, or from what was set after its copies in loading processes "
        "were made (set_epoch)"
    )
