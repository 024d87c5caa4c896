"""Computes a task twice now and then, on the same worker, to see that it is a pure function.

A worker repeats its first task, one task of the job in each of the first steps, and later one per
cycle of steps. A difference has a cause that is not keyed by the task: tasks computed before it, a
generator of the script's own, a machine's passing fault, or kernels that are not deterministic.
Further runs distinguish these, some with another task in between: a single run that differs is a
machine's fault, and noise stays small after any earlier task. Where several runs
differ, other workers may have to decide whether it is the machine.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.step.audit import Sketch, are_near
from holdfast.engine.core.step.audits import EARLY_STEPS

RUNS_MAX = 6  # runs of a task in all: before the counted one, that one, and after it
RUNS_CLOSE = 4  # runs of a worker's first task, if it is one of the job's first
RUNS_QUICK = 40  # the most runs of such a task, in at most:
QUICK_S = 1.0
RUNS_ODD = 14  # runs if one differs: a script that counts its calls makes another one differ
RUNS_SUSPECTED = 64  # runs if one differs in a script that does something which may cause it
#: The least number of runs after a run that differs.
RUNS_AFTER = 8
# The run whose batch is loaded in a data worker: copies of the dataset in these processes differ
# from the script's own each time, where a machine's passing fault does not come again.
RUN_ELSEWHERE = 3
OTHERS_BEFORE = (0, 0, 0, 1, 0, 2)  # other tasks that are computed before each of these runs
# runs that settle by this factor show a script's doing, where noise would stay as large
SETTLES = 4.0


def count_tasks_before(run: int) -> int:
    """Return the number of other tasks that are computed before this run of a task."""
    return OTHERS_BEFORE[run] if run < len(OTHERS_BEFORE) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMark:
    """Describes the input and the result of a run; 0 for a batch that cannot be digested."""

    batch: int
    result: int
    #: Sketch of the gradient, where it is wanted.
    sketch: Sketch = ()
    #: Digest of the values that it hands over besides its gradient.
    handed: int = 0
    #: Encoded list of records that could not be read.
    bad: bytes = b""


class RepeatedTasks:
    """Decides which tasks are repeated, and judges their results.

    `cycle`: steps in which one task is repeated; 0: none ever is. `tolerance`: by how much of its
    norm a gradient may differ where kernels are not deterministic; `is_exact` returns whether they
    are. `describe` returns a text about variables that the script's loop carries from task to task,
    for messages.
    """

    def __init__(
        self,
        cycle: int,
        vranks: int,
        tolerance: float,
        log: Callable[[str], None],
        is_exact: Callable[[], bool],
        describe: Callable[[], str],
    ) -> None:
        self._cycle = cycle
        self._vranks = vranks
        self._tolerance = tolerance
        self._log = log
        self._is_exact = is_exact
        self._describe = describe
        self._is_first = True  # this worker has repeated no task yet
        self._is_earliest = False  # the task repeated now was this worker's first
        self._is_close = False  # the repeated task is examined more closely
        self._has_told_noise = False

    @property
    def wants_sketches(self) -> bool:
        """Return whether runs are compared by sketches as well, as their bits may differ."""
        return not self._is_exact()

    def is_due(self, step: int, vrank: int) -> bool:
        """Return whether this task, which is about to begin, has to be repeated."""
        if not self._cycle:
            return False
        turn, within = divmod(step, 1 if step < EARLY_STEPS else self._cycle)
        due = self._is_first or (within == 0 and turn % self._vranks == vrank)
        if due:
            # The workers wait for a worker that joins later.
            self._is_close = self._is_first and step < EARLY_STEPS
            self._is_earliest, self._is_first = self._is_first, False
        return due

    @property
    def is_exact(self) -> bool:
        """Return whether a task has the same bits each time on a sound machine."""
        return self._is_exact()

    def judge_runs(self, runs: Sequence[RunMark], task: str, spent_s: float = math.inf) -> bool:
        """Judge the runs of a task in their order; the second one counts.

        `spent_s`: how long they have taken. Returns False if another run is needed. UserError if
        the task is no function of its inputs; WorldError if the run that counts was wrong.
        """
        counts = runs[1]
        if any(each.bad != counts.bad for each in runs):
            # a record's file has changed between the runs, which is no fault of the script
            return True
        if all(_agree(counts, each) for each in runs) or self._is_known_noise(runs):
            quick = spent_s < QUICK_S and len(runs) < RUNS_QUICK
            return len(runs) >= (RUNS_CLOSE if self._is_close else 2) and not (
                self._is_close and quick
            )
        if len(runs) < RUNS_MAX:
            return False
        (most, times), *_ = Counter(map(_outcome, runs)).most_common(1)
        # Objects made by a script at its first task make that task's first run the odd one.
        begins = self._is_earliest and _outcome(runs[0]) != most
        if times == len(runs) - 1 and not begins:
            odd = next(i for i, each in enumerate(runs) if _outcome(each) != most)
            if len(runs) < max(RUNS_ODD, odd + RUNS_AFTER):
                return False
            if len(runs) < RUNS_SUSPECTED and self._describe():
                return False
            if most == _outcome(counts):
                return True  # a repetition was computed wrongly: no harm is done
            raise WorldError(
                f"{task} was computed wrongly here once, and rightly {times} times: this worker "
                "leaves"
            )
        if len({each.batch for each in runs}) > 1:
            raise UserError(_other_batch(task))
        if self._is_exact() or not _is_noise(runs, self._tolerance):
            raise self.accuse(runs, task)
        self._log_noise(task)
        return True

    def is_made_at_first(self, runs: Sequence[RunMark]) -> bool:
        """Return whether only the first run of a worker's first task differs, early in the job.

        Then the script most likely makes objects in that run. A machine is rarely wrong just there,
        and little is lost if the job ends for it.
        """
        first, *others = map(_outcome, runs)
        return self._is_close and len(set(others)) == 1 and first != others[0]

    def accuse(self, runs: Sequence[RunMark], task: str) -> UserError:
        """Return an error that blames the script for the differences between runs of a task."""
        return UserError(
            f"{task} came to {_difference_of(runs)} each time that this worker computed it"
            f"{self._describe()}: a task must depend on nothing but the parameters, its batch "
            "and the global random generators; keep what changes from task to task (counters, "
            "hidden states, running averages, generators) out of it, or in buffers and "
            "job.values"
        )

    def _is_known_noise(self, runs: Sequence[RunMark]) -> bool:
        return self._has_told_noise and all(
            are_near(runs[1].sketch, each.sketch, self._tolerance) for each in runs
        )

    def _log_noise(self, task: str) -> None:
        if self._has_told_noise:
            return
        self._has_told_noise = True
        self._log(
            f"{task} came to slightly other bits each time that a worker computed it: results are "
            "exact up to that noise only; use torch.use_deterministic_algorithms(True), and keep "
            "what changes from task to task out of the loss"
        )


def _is_noise(runs: Sequence[RunMark], tolerance: float) -> bool:
    """Return whether runs differ as kernels' noise does: little, after any earlier task.

    State that a script keeps settles while one task is repeated, and moves away with another task.
    """
    if not all(are_near(runs[1].sketch, each.sketch, tolerance) for each in runs):
        return False
    gaps = [math.dist(a.sketch[1:], b.sketch[1:]) for a, b in itertools.pairwise(runs)]
    others = map(count_tasks_before, range(1, len(runs)))
    between = list(zip(gaps, others, strict=True))
    direct = [gap for gap, count in between if not count]
    apart = [gap for gap, count in between if count]
    settles = direct[0] > SETTLES * direct[1] > 0
    return not settles and min(apart) <= SETTLES * max(direct[1:])


def fingerprint_result(loss: float, weight: float, gradient: int) -> int:
    """Return 64 bits of a task's result."""
    return xxhash.xxh3_64_intdigest(struct.pack("<2dQ", loss, weight, gradient))


def _outcome(run: RunMark) -> tuple[int, int, int]:
    return run.batch, run.result, run.handed


def is_machine_possible(runs: Sequence[RunMark]) -> bool:
    """Return whether runs differ as on a machine that computes wrongly now and then, or always.

    Two wrong runs of a machine hardly have the same bits; a script's different results may recur.
    """
    (_, *others) = Counter(map(_outcome, runs)).most_common()
    return len({each.batch for each in runs}) == 1 and all(times == 1 for _, times in others)


def are_alike(runs: Sequence[RunMark]) -> bool:
    """Return whether all runs of a task have the same bits."""
    return all(_agree(runs[0], each) for each in runs)


def _agree(one: RunMark, other: RunMark) -> bool:
    return _outcome(one) == _outcome(other)


def _difference_of(runs: Sequence[RunMark]) -> str:
    if len({each.result for each in runs}) > 1:
        return "another gradient"
    return "other values for step.gather or for rank states"


def _other_batch(task: str) -> str:
    return (
        f"{task} got another batch when the dataset was asked again for the same samples: "
        "derive a sample from its index and from the global generators of Python, NumPy and torch, "
        "which are keyed by the task; not from generators or counters of the dataset's own, of its "
        "transforms' or collate_fn's, or from values set after its copies in loading processes "
        "were made (set_epoch)"
    )
