"""Chooses how often to save, by weighing the cost of checkpoints against their use.

Young's interval (J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 1974) with Daly's further terms (J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 2006). Both the cost of a save and the rate of losses are measured
while the job runs. Most losses need no checkpoint here, since other workers hold the state, so the
interval is a cautious one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from statistics import median

from holdfast.engine.core.policies import PacePolicy

# Until a job has seen losses of its own: 419 unexpected interruptions of 16,384 GPUs in 54 days
# (Llama 3, arXiv:2407.21783, Table 5), as seconds of one worker for each.
WORKER_MTBF_S = 16_384 * 54 * 86_400 / 419
STEPS_KEPT = 50


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds from the end of a save to the begin of the next, for the least time lost."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


class Pace:
    """Measures the job for one worker; times are seconds of any one clock.

    The cost of a save is how long training stands still for it, and how much longer than usual the
    steps take while it is written.
    """

    def __init__(self, policy: PacePolicy, now: float) -> None:
        self._policy = policy
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)  # seconds of those beside no save
        self._saved_at = self._step_at = now
        self._under_way: float | None = None  # what the present save has cost so far
        self._cost_s = 0.0
        self._workers: Set[object] = frozenset()
        self._worker_s = 0.0  # seconds of all workers together
        self._losses = 0

    def record_members(self, workers: Set[object]) -> None:
        """Record the processes of a new view; those that are not in it any more count as lost."""
        before, self._workers = self._workers, workers
        self._losses += len(before - self._workers)

    def record_step(self, now: float, busy: bool) -> None:
        """Record that a step has ended, with a save under way or not."""
        step_s = now - self._step_at
        self._step_at = now
        self._worker_s += step_s * len(self._workers)
        if self._under_way is None:
            self._steps.append(step_s)
        elif busy:
            self._under_way += max(step_s - median(self._steps or [step_s]), 0.0)
        else:
            self._cost_s, self._under_way = self._under_way, None

    def record_save(self, now: float, stall_s: float) -> None:
        """Record that a save was begun after the newest step, and how long training stood still."""
        self._saved_at = self._step_at = now
        self._under_way = stall_s

    @property
    def mtbf_s(self) -> float:
        """Mean time between losses of any worker."""
        mean_s = (WORKER_MTBF_S + self._worker_s) / (1 + self._losses)
        return mean_s / max(len(self._workers), 1)

    @property
    def interval_s(self) -> float:
        best = best_interval_s(self._cost_s, self.mtbf_s) if self._cost_s else 0.0
        return min(max(best, self._policy.least_s), self._policy.most_s)

    def is_due(self, now: float) -> bool:
        return now - self._saved_at >= self.interval_s

    def __str__(self) -> str:
        return (
            f"every {self.interval_s:.3g} s: a save costs {self._cost_s:.2g} s, and one of "
            f"{len(self._workers)} workers is lost every {self.mtbf_s:.3g} s"
        )
