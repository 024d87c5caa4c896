"""Chooses how often a job saves and replicates, by the cost of a copy and the rate of losses.

The formulas serve `holdfast plan` with expected rates, and a running job with measured ones. They
are Young's interval (J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 1974) with Daly's further terms (J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 2006).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from holdfast.engine.core.policies import WORKER_MTBF_S, PacePolicy, ReplicationPolicy
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import View

#: A whole cluster is away up to once in 30 days: between two times, in seconds.
OUTAGE_MTBF_S = 60 * 86_400.0
#: Steps between two replicated states, at most: the gradients since are logged, and take memory.
REPLICATE_MOST = 100
STEPS_KEPT = 50


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time from the end of a save to the begin of the next, for the least time lost.

    Daly's equation 37.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def best_steps(cost_s: float, *, apply_s: float, step_s: float, mtbf_s: float) -> int:
    """Return the steps from one replicated state to the next, for the least time lost.

    After a loss the steps since the newest state are applied again, in `apply_s` each.
    """
    if min(apply_s, step_s) <= 0:
        return REPLICATE_MOST
    interval_s = best_interval_s(cost_s, mtbf_s * step_s / apply_s)
    return min(max(round(interval_s / step_s), 1), REPLICATE_MOST)


def chance_of_losing_pieces(
    redundancy: Redundancy, nodes: int, *, loss_rate: float, window_s: float
) -> float:
    """Return the probability that too few pieces of a state are left, once a node was lost.

    Further nodes are lost at `loss_rate` in a second, until the next state is replicated after
    `window_s`.
    """
    tolerated = redundancy.nodes_to_lose(nodes) if redundancy.data else 0
    if tolerated == 0:
        return 1.0
    holders = min(redundancy.pieces_on(nodes) - 1, nodes - 1) / max(nodes - 1, 1)
    mean = loss_rate * window_s * holders
    fewer = math.exp(-mean) * sum(mean**k / math.factorial(k) for k in range(tolerated))
    return max(1.0 - fewer, 0.0)


class CopyCost:
    """Measures what copies of one kind cost a worker; times are seconds of any one clock.

    A copy costs the time for which training stands still for it, and the time by which steps take
    longer than usual while it is written.
    """

    def __init__(self) -> None:
        #: The cost of the newest whole copy; 0: there was none.
        self.cost_s = 0.0
        # Seconds of steps while no copy was written.
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._step_at: float | None = None
        # The cost of the present copy so far.
        self._under_way: float | None = None

    def record_step(self, now: float, *, busy: bool) -> None:
        """Record that a step has ended, with a copy under way or not."""
        if self._step_at is None:
            self._step_at = now
            return
        step_s, self._step_at = now - self._step_at, now
        if self._under_way is None:
            self._steps.append(step_s)
        elif busy:
            self._under_way += max(step_s - median(self._steps or [step_s]), 0.0)
        else:
            self.cost_s, self._under_way = self._under_way, None

    def begin(self, now: float, stall_s: float) -> None:
        """Record that training stood still for a copy, for `stall_s`, and continues now."""
        self._step_at, self._under_way = now, stall_s


class Exposure:
    """Measures for one worker how often workers are lost, and with it the job's state."""

    def __init__(self, policy: ReplicationPolicy | None = None) -> None:
        self._policy = policy or ReplicationPolicy()
        self._replicate_every = self._policy.every or REPLICATE_MOST
        self._view: View | None = None
        self._members: frozenset[tuple[WorkerId, Incarnation]] = frozenset()
        # The number of nodes on which the members are.
        self._nodes = 0
        # Seconds of all workers together.
        self._worker_s = 0.0
        self._losses = 0
        self._step_at: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)

    def enter(self, view: View) -> None:
        """Record a new view. A process that is missing in it counts as lost."""
        before, self._members = self._members, frozenset(view.incarnations)
        self._losses += len(before - self._members)
        self._nodes = len({node for member in view.members for node in member.nodes})
        self._view = view

    def record_step(self, now: float) -> None:
        """Record that a step has ended."""
        if self._step_at is not None:
            self._steps.append(now - self._step_at)
            self._worker_s += self._steps[-1] * self.workers
        self._step_at = now

    @property
    def workers(self) -> int:
        """Return the number of workers in the newest view."""
        return len(self._members)

    @property
    def loss_mtbf_s(self) -> float:
        """Return the mean time between losses of any worker."""
        mean_s = (WORKER_MTBF_S + self._worker_s) / (1 + self._losses)
        return mean_s / max(self.workers, 1)

    @property
    def return_mtbf_s(self) -> float:
        """Return the mean time between losses of the state, after which a checkpoint is loaded."""
        return 1 / (self._chance_of_return() / self.loss_mtbf_s + 1 / OUTAGE_MTBF_S)

    def _chance_of_return(self) -> float:
        """Return the probability that the loss of a worker takes some of the state with it."""
        view = self._view
        if view is None:
            return 1.0
        if self._nodes > 1 and self.workers > 1 and not self._policy.is_sharded:
            return 0.0  # workers on other nodes hold the whole state
        if self._nodes == 1 or not view.ring:
            return 1.0
        step_s = median(self._steps or [0.0])
        return chance_of_losing_pieces(
            self._policy.redundancy,
            self._nodes,
            loss_rate=1 / self.loss_mtbf_s,
            window_s=self._replicate_every * step_s,
        )

    def choose_steps(self, cost_s: float, apply_s: float) -> int:
        """Return the steps from one replicated state to the next.

        `cost_s`: what a replicated state costs. `apply_s`: the time to apply a step.
        """
        if not self._policy.every:
            step_s = median(self._steps or [0.0])
            self._replicate_every = best_steps(
                cost_s, apply_s=apply_s, step_s=step_s, mtbf_s=self.loss_mtbf_s
            )
        return self._replicate_every


class Pace:
    """Finds for one worker when to save next; times are seconds of any one clock."""

    def __init__(self, policy: PacePolicy, exposure: Exposure, now: float) -> None:
        self._policy = policy
        self._exposure = exposure
        self._saved_at = now
        self._cost = CopyCost()

    def record_step(self, now: float, *, busy: bool) -> None:
        """Record that a step has ended, with a save under way or not."""
        self._cost.record_step(now, busy=busy)

    def record_save(self, now: float, stall_s: float) -> None:
        """Record that a save was begun after the newest step, and how long training stood still."""
        self._saved_at = now
        self._cost.begin(now, stall_s)

    @property
    def interval_s(self) -> float:
        """Return the time between two saves, within the operator's bounds."""
        cost_s, mtbf_s = self._cost.cost_s, self._exposure.return_mtbf_s
        best_s = best_interval_s(cost_s, mtbf_s) if cost_s else 0.0
        return min(max(best_s, self._policy.least_s), self._policy.most_s)

    def is_due(self, now: float) -> bool:
        return now - self._saved_at >= self.interval_s

    def __str__(self) -> str:
        exposure = self._exposure
        return (
            f"every {self.interval_s:.3g} s: a save costs {self._cost.cost_s:.2g} s, one of "
            f"{exposure.workers} workers is lost every {exposure.loss_mtbf_s:.3g} s, and the "
            f"state of all every {exposure.return_mtbf_s:.3g} s"
        )
