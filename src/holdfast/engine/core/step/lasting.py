"""Finds slowness that lasts, which people should act on, and machines that are busy. Pure.

On a machine that other programs use as well each worker is slower than its peers now and then, for
many steps in a row if steps are short: single steps are no independent samples there. So a worker
is a straggler only once its slowness has cost two seconds of computing, and is far beyond that of
all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.step.link_detector import LinkVerdict
from holdfast.engine.core.types import WorkerId

SLOW = 1.4  # times its peers' time, on average
USUAL = 1.1  # no longer slow
BEYOND = 4.0  # its excess, in units of the largest excess of another worker
WINDOW = 64  # steps in the average
STEPS_MIN = 16
LOST_S_MIN = 2.0
LINK_STEPS = 64  # since a link was found to be slow
PASSING_MIN = 6  # verdicts on workers that are slow for a while, until machines count as busy


@dataclass(slots=True)
class _Record:
    """Keeps the times of one worker and of its peers; both are averages that forget old steps."""

    steps: int = 0
    spent_s: float = 0.0
    usual_s: float = 0.0
    lost_s: float = 0.0  # since it became slow
    is_told: bool = False

    @property
    def factor(self) -> float:
        return self.spent_s / self.usual_s if self.usual_s else 1.0

    @property
    def is_suspect(self) -> bool:
        costs = self.steps >= STEPS_MIN and self.lost_s >= LOST_S_MIN
        return costs and self.factor >= SLOW and not self.is_told

    def add(self, task_s: float, usual_s: float, tasks: int) -> None:
        """Take in one step."""
        self.steps += 1
        share = 1 / min(self.steps, WINDOW)
        self.spent_s += (task_s - self.spent_s) * share
        self.usual_s += (usual_s - self.usual_s) * share
        self.lost_s += max(task_s - usual_s, 0.0) * tasks
        if self.factor < USUAL:
            self.lost_s, self.is_told = 0.0, False

    def tell(self, worker: WorkerId) -> str:
        """Return a sentence on a straggler, which is said once."""
        self.is_told = True
        steps = min(self.steps, WINDOW)
        return (
            f"worker {worker} is a straggler: a task took it {self.factor:.2g} times as long as "
            f"its peers in the last {steps} steps; that has cost {self.lost_s:.2g} s"
        )


class LastingSlowness:
    """Judges the workers of one view by the times of their tasks."""

    def __init__(self) -> None:
        self._records: dict[WorkerId, _Record] = {}
        # By the ends of a slow link: steps since the verdict, and the verdict.
        self._links: dict[tuple[WorkerId, WorkerId | None], tuple[int, LinkVerdict]] = {}
        self._passing: dict[WorkerId, int] = {}  # how often each was slow for a while
        self._is_busy_told = False

    def observe(
        self, tasks_s: Mapping[WorkerId, float], counts: Mapping[WorkerId, int]
    ) -> list[tuple[WorkerId, str]]:
        """Take in the seconds of one task of each host, and how many each has.

        Returns the workers that are stragglers from now on, each with a sentence.
        """
        ordered = sorted(task_s for task_s in tasks_s.values() if task_s > 0)
        if len(ordered) < 2:
            return []
        middle = (len(ordered) - 2) // 2  # the median's place among all other workers
        suspects = []
        for worker, task_s in tasks_s.items():
            if task_s > 0:
                record = self._records.setdefault(worker, _Record())
                usual_s = ordered[middle + (task_s <= ordered[middle])]
                record.add(task_s, usual_s, counts[worker])
                if record.is_suspect:
                    suspects.append(worker)
        return [(w, self._records[w].tell(w)) for w in suspects if self._is_beyond_others(w)]

    def _is_beyond_others(self, worker: WorkerId) -> bool:
        others = (record.factor for each, record in self._records.items() if each != worker)
        return self._records[worker].factor - 1 >= BEYOND * (max(others, default=1.0) - 1)

    def observe_links(self, news: Sequence[LinkVerdict]) -> list[tuple[WorkerId, str]]:
        """Take in the news of a step; return links that are slow for long now, each once."""
        for each in news:
            self._links.pop((each.worker, each.to), None)
            if each.slow:
                self._links[each.worker, each.to] = 0, each
        found = []
        for ends, (steps, verdict) in self._links.items():
            self._links[ends] = steps + 1, verdict
            if steps == LINK_STEPS:
                found.append((verdict.worker, f"for {steps} steps by now, {verdict}"))
        return found

    def find_busy(self, slow: Iterable[WorkerId], hosts: int) -> str:
        """Return a sentence on busy machines, once; `slow`: workers with a new passing verdict."""
        for worker in slow:
            self._passing[worker] = self._passing.get(worker, 0) + 1
        times, several = sum(self._passing.values()), len(self._passing) >= min(hosts, 2)
        if self._is_busy_told or times < PASSING_MIN or not several:
            return ""
        self._is_busy_told = True
        return (
            f"{times} times by now a worker was slow for a while: other programs use "
            "these machines, or samples differ in size; the event log has each of these lines"
        )
