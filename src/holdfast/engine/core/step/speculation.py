"""Decides when workers are late, and how much may be computed again because of that. Pure.

A worker that is done with its tasks waits for other workers in nearly every step. Its usual wait,
and the spread of its waits, show when another worker is late. First the waiting workers copy the
tasks of the late one, which does no harm. Later, when the wait has cost as much as a view without
it would, it is suspended (core/membership/formation.py). Both together are bounded by a share of
all tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.core.assignment import Paths, assign_mid_step
from holdfast.engine.core.types import WorkerId

STEPS_TIMED = 16
SPREADS = 6.0  # beyond the usual: chance is no explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Sets when a waiting worker acts, beyond the usual wait and its spread.

    It copies tasks once it has waited for as long as that takes, and reports late members after a
    step's duration and `least_s` (or the time to build the group, if longer).
    """

    #: The least number of steps that have been timed before.
    steps: int = 8
    #: The multiple of the duration of a task, or a step.
    times: float = 1.0
    least_s: float = 0.5
    #: The copied tasks for each task that the worker computes itself; 0: none.
    copies: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Medians:
    """Keeps the usual times of one worker's last steps, and the spread of its waits."""

    step_s: float
    task_s: float
    wait_s: float
    spread_s: float


class Lateness:
    """Judges for one worker when other workers are late. Times are its node's, in seconds."""

    def __init__(self, patience: Patience) -> None:
        self.began_at = 0.0  # when the step under way, or its view, began here
        self.group_s = 0.0  # what the building of a group took, at least; 0: not known
        self.copied = 0  # tasks
        self._patience = patience
        self._since = 0.0  # when it was done with its tasks
        self._tasks = 0  # computed so far, copies not counted
        self._steps: deque[float] = deque(maxlen=STEPS_TIMED)  # their durations
        self._waits: deque[float] = deque(maxlen=STEPS_TIMED)  # the shares of steps spent waiting
        self._task_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._usual: _Medians | None = None  # medians of the above, until the next step is timed

    def record_view(self, now: float) -> None:
        """Record that another view begins, perhaps in the middle of a step."""
        self.began_at = self._since = now

    def record_built(self, now: float) -> None:
        """Record that the view's group works and that its joiners hold the state."""
        took_s = now - self.began_at
        self.group_s = min(self.group_s, took_s) if self.group_s else took_s

    def count_copy(self) -> None:
        """Count a task that this worker has computed since another one is late with it."""
        self.copied += 1

    def record_done(self, now: float) -> None:
        """Record that this worker waits for other workers from now on."""
        self._since = now

    def record_step(self, now: float, tasks: int, *, timed: bool = True) -> None:
        """Record that the step is over, and that the worker has computed `tasks` tasks of it.

        `timed`: other steps take about as long.
        """
        if timed:
            self._steps.append(now - self.began_at)
            self._waits.append(now - self._since)
            self._task_s.append((self._since - self.began_at) / max(tasks, 1))
            self._tasks += tasks
            self._usual = None
        self.began_at = now

    @property
    def copy_at(self) -> float:
        """Return the time to begin with copies, if members are not done by then."""
        if self.copied > self._patience.copies * self._tasks or not self._patience.copies:
            return float("inf")
        return self._time_after(self._patience.times * self._medians().task_s)

    @property
    def late_at(self) -> float:
        """Return the time to report late members."""
        patience = self._patience
        after = self._time_after(patience.times * self._medians().step_s)
        return after + max(patience.least_s, self.group_s)

    def _time_after(self, cost_s: float) -> float:
        if len(self._steps) < self._patience.steps:
            return float("inf")
        usual = self._medians()
        return self._since + usual.wait_s + max(SPREADS * usual.spread_s, cost_s)

    def _medians(self) -> _Medians:
        """Return the usual times; asked for whenever the worker begins to wait."""
        if self._usual is None:
            wait_s = _middle(self._waits)
            spread_s = 1.4826 * _middle([abs(each - wait_s) for each in self._waits])
            task_s, step_s = _middle(self._task_s), _middle(self._steps)
            self._usual = _Medians(step_s=step_s, task_s=task_s, wait_s=wait_s, spread_s=spread_s)
        return self._usual


class Budget:
    """Limits the cost of suspending workers. `share`: of all tasks; 0: none. `tasks`: in a step.

    A little may be spent in advance. Each step allows one attempt at most, because a stop after
    which no worker turns out to be late has cost something, too.
    """

    def __init__(self, share: float, tasks: int) -> None:
        self.spent = 0  # tasks computed again
        self._share = share
        self._tasks = tasks
        self._tried_in = -1
        self._since: int | None = None  # the step from which tasks are counted

    def allows(self, step: int) -> bool:
        """Return whether other workers may compute the late tasks of this step."""
        if self._since is None:
            self._since = step
        if not self._share or step == self._tried_in:
            return False
        committed = (step - self._since) * self._tasks
        return self.spent <= self._share * committed

    def record_trial(self, step: int) -> None:
        """Record that a view is stopped for late tasks of this step."""
        self._tried_in = step

    def spend(self, tasks: int) -> None:
        """Count tasks that are computed again."""
        self.spent += tasks


def choose_copies(
    owners: Sequence[WorkerId],
    paths: Paths,
    late: Iterable[WorkerId],
    me: WorkerId,
) -> tuple[int, ...]:
    """Virtual ranks that `me` would get if these were suspended; none if they are the most.

    `paths`: where the nodes of all members are.
    """
    slow = frozenset(late)
    others = [worker for worker in paths if worker not in slow]
    if me not in others or len(slow) > len(others):
        return ()
    after = assign_mid_step(others, owners, paths)
    return tuple(v for v, owner in enumerate(after) if owner == me and owners[v] != me)


def _middle(values: deque[float] | list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
