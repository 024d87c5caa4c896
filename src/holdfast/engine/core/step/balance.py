"""Decides how many virtual ranks each worker hosts, from their speeds. Pure.

All members of a view receive the same times in the votes and make the same decision, so a change of
the assignment needs no view of its own: it holds from the next step on. All numbers are whole, so
that no rounding differs between machines. A change must promise a clear gain, over several steps,
and each one makes the next wait longer: an assignment that swings costs more than a mediocre one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.assignment import ONE_MACHINE, Paths, Takers
from holdfast.engine.core.types import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancePolicy:
    """Numbers of steps, but for `gain`: the percentage by which the slowest must become faster."""

    #: The first steps of a view that do not count.
    warm_up: int = 2
    #: A decision rests on at least this number of steps.
    window: int = 6
    gain: int = 8
    #: After this number of steps without a change the window is as short as at first.
    calm: int = 200
    #: After this number of steps a worker without tasks gets one again, to be measured.
    retry: int = 50


WINDOW_TIMES_MAX = 8  # by so much a window grows


class Balancer:
    """Balances the workers of one view. `owners[v]`: who hosts virtual rank v in the next step."""

    def __init__(
        self,
        policy: BalancePolicy,
        workers: Sequence[WorkerId],
        owners: Sequence[WorkerId],
        paths: Paths = ONE_MACHINE,
    ) -> None:
        self.owners = tuple(owners)
        self._policy = policy
        self._paths = paths
        self._workers = tuple(workers)
        self._counts = _count_hosted(self._workers, self.owners)
        self._steps = 0
        self._rows: deque[list[int]] = deque()  # the window's microseconds a task, by worker
        self._paces = [0] * len(self._workers)  # each worker's pace; 0: unknown
        self._idle_since = [0] * len(self._workers)
        self._retries = [policy.retry] * len(self._workers)
        self._window_times = 1
        self._changed_at = 0

    def observe(self, compute_us: Sequence[int]) -> bool:
        """Take in each worker's time of a step, in order; return whether `owners` changed."""
        self._steps += 1
        if self._steps <= self._policy.warm_up or len(self._workers) == 1:
            return False
        row = [us // n if n else 0 for us, n in zip(compute_us, self._counts, strict=True)]
        self._rows.append(row)
        if self._steps - self._changed_at > self._policy.calm:
            self._window_times = 1
        if len(self._rows) < self._policy.window * self._window_times:
            return False
        self._measure()
        while len(self._rows) > self._policy.window * self._window_times // 2:
            self._rows.popleft()
        counts = self._retry() or self._find_better()
        if counts is None:
            return False
        self.owners = _move_owners(self._workers, self.owners, counts, self._paths)
        self._counts = counts
        self._rows.clear()
        self._changed_at = self._steps
        self._window_times = min(2 * self._window_times, WINDOW_TIMES_MAX)
        return True

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of virtual ranks that each worker hosts."""
        return tuple(self._counts)

    @property
    def paces(self) -> tuple[int, ...]:
        """Microseconds a task of each worker, as far as known (else 0)."""
        return tuple(self._paces)

    def _measure(self) -> None:
        for i, count in enumerate(self._counts):
            if count:
                values = sorted(row[i] for row in self._rows)
                self._paces[i] = max(values[len(values) // 2], 1)
                self._idle_since[i] = self._steps

    def _find_better(self) -> list[int] | None:
        """Return other counts, if they promise enough."""
        paces, counts = self._paces, self._counts
        if not all(paces):
            return None
        now = max(n * pace for n, pace in zip(counts, paces, strict=True))
        best = _makespan(paces, len(self.owners))
        if best * 100 > now * (100 - self._policy.gain):
            return None
        return _fit_counts(self._workers, paces, counts, best, self._paths)

    def _retry(self) -> list[int] | None:
        """Give one task to a worker that has had none for long, from the worker with most to do."""
        for i, count in enumerate(self._counts):
            if not count and self._steps - self._idle_since[i] >= self._retries[i]:
                self._retries[i] *= 2
                counts = list(self._counts)
                busiest = max(range(len(counts)), key=lambda j: (counts[j] * self._paces[j], -j))
                counts[busiest] -= 1
                counts[i] += 1
                return counts
        return None


def _count_hosted(workers: Sequence[WorkerId], owners: Sequence[WorkerId]) -> list[int]:
    number = {worker: i for i, worker in enumerate(workers)}
    counts = [0] * len(workers)
    for owner in owners:
        counts[number[owner]] += 1
    return counts


def _makespan(paces: Sequence[int], tasks: int) -> int:
    """Return the shortest time for all tasks: each goes to the worker that ends it first."""
    free = [(pace, i) for i, pace in enumerate(paces)]
    heapq.heapify(free)
    end = 0
    for _ in range(tasks):
        end, i = free[0]
        heapq.heapreplace(free, (end + paces[i], i))
    return end


def _fit_counts(
    workers: Sequence[WorkerId],
    paces: Sequence[int],
    counts: Sequence[int],
    end: int,
    paths: Paths,
) -> list[int]:
    """Return counts with which all is done by `end`, as near to the present ones as can be.

    A task goes to the nearest worker that ends it by then, and among these to the first to end it.
    """
    fitted = [min(n, end // pace) for n, pace in zip(counts, paces, strict=True)]
    number = {worker: i for i, worker in enumerate(workers)}
    ends = ((n + 1) * pace for n, pace in zip(fitted, paces, strict=True))
    takers = Takers(dict(zip(workers, ends, strict=True)), paths)
    surplus = [n - kept for n, kept in zip(counts, fitted, strict=True)]
    for giver, more in zip(workers, surplus, strict=True):
        for _ in range(more):
            taker = takers.find(paths.get(giver, ()), end)
            assert taker is not None, "all tasks together are done by then"
            i = number[taker]
            fitted[i] += 1
            takers.set_cost(taker, (fitted[i] + 1) * paces[i])
    return fitted


def _move_owners(
    workers: Sequence[WorkerId], owners: Sequence[WorkerId], counts: Sequence[int], paths: Paths
) -> tuple[WorkerId, ...]:
    """Return owners with these counts. A worker with too many gives away its last ones.

    They go to the host of the neighbour in the canonical tree, or the nearest worker to the giver.
    """
    left = dict(zip(workers, counts, strict=True))
    kept: list[WorkerId | None] = []
    for owner in owners:
        kept.append(owner if left[owner] > 0 else None)
        left[owner] -= 1 if left[owner] > 0 else 0
    takers = Takers({worker: int(not count) for worker, count in left.items()}, paths)
    for vrank, holder in enumerate(kept):
        if holder is None:
            beside = kept[vrank ^ 1] if vrank ^ 1 < len(kept) else None
            taker = beside if beside is not None and left[beside] else None
            if taker is None:
                taker = takers.find(paths.get(owners[vrank], ()), 0)
            assert taker is not None, "the counts add up to the number of virtual ranks"
            kept[vrank] = taker
            left[taker] -= 1
            if not left[taker]:
                takers.set_cost(taker, 1)
    return tuple(owner for owner in kept if owner is not None)
