"""Judges each step's times, on all members of a view alike: slow workers, and hosts. Pure.

Every member observes the same numbers in the same order, so all of them hold the same assignment;
only the leader looks for slow workers, and reports them to the job's event log.

`LastingSlowness` finds slowness on which people should act, and machines that are busy. On a
machine that other programs use as well each worker is slower than its peers now and then, for many
steps in a row if steps are short: single steps are no independent samples there. So a worker is a
straggler only once its slowness has cost two seconds of computing, and is far larger than the
slowness of all other workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.assignment import assign_at_boundary
from holdfast.engine.core.ground.events import EventNoted, Wait
from holdfast.engine.core.step.balance import BalancePolicy, Balancer
from holdfast.engine.core.step.link_detector import COSTS_MIN_US, LinkDetector, LinkVerdict
from holdfast.engine.core.step.stragglers import Detector, Kind, Verdict
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

PASSING = (Kind.INTERMITTENT, Kind.PERIODIC)
SLOW = 1.4  # times its peers' time, on average
USUAL = 1.1  # no longer slow
BEYOND = 4.0  # its excess, in units of the largest excess of another worker
WINDOW = 64  # steps in the average
STEPS_MIN = 16
LOST_S_MIN = 2.0
LINK_STEPS = 64  # since a link was found to be slow
PASSING_MIN = 6  # verdicts on workers that are slow for a while, until machines count as busy


class Speeds:
    """Judges the workers of one view. Without a `policy` the assignment stays as it is."""

    def __init__(self, view: View, policy: BalancePolicy | None) -> None:
        self._view = view
        self._policy = policy or BalancePolicy()
        self._hosts = tuple(w for w in view.workers if w not in view.spares)
        self._balancer = Balancer(self._policy, self._hosts, view.owners, view.paths)
        self._detector = Detector(view.workers)
        self._lasting = LastingSlowness()
        self._links = LinkDetector(view.workers)
        self._rebalance = policy is not None
        self._told_slow: dict[WorkerId, bool] = {}
        self._last_told: dict[WorkerId, Kind] = {}  # the kind of each one's last logged slowness
        idle = [w for w in view.unproven if w not in view.owners and w not in view.spares]
        self._newly_fed = bool(idle) and len(self._hosts) <= len(view.owners)

    @property
    def owners(self) -> tuple[WorkerId, ...]:
        """Return the host of each virtual rank from the next step on."""
        return self._balancer.owners

    def observe(
        self, compute_us: Sequence[int], leads: bool, waits: Sequence[Wait] = ()
    ) -> list[EventNoted]:
        """Take in the times of each member's own tasks, and its waits (not simulated).

        Returns events for the job's log.
        """
        counts = self._balancer.counts
        number = dict(zip(self._hosts, counts, strict=True))  # tasks of each host: spares have none
        costs = dict(zip(self._view.workers, compute_us, strict=True))
        found: list[EventNoted] = []
        if leads:
            shares = {w: number.get(w, 0) for w in costs}
            tasks_s = {w: us / shares[w] / 1e6 if shares[w] else 0.0 for w, us in costs.items()}
            found += self._judge(tasks_s, shares, costs)
            verdicts = self._links.observe(waits, compute_us)
            found += [EventNoted("slow", str(v), v.worker) for v in verdicts]
            lasting = self._lasting.observe_links(verdicts)
            found += [EventNoted("straggler", text, worker) for worker, text in lasting]
        if self._newly_fed:
            self._newly_fed = False
            self._balancer = self._with_all()
        elif self._rebalance and self._balancer.observe([costs[w] for w in self._hosts]) and leads:
            found.append(EventNoted("balance", "; ".join(self._changes(counts))))
        return found

    def _judge(
        self,
        tasks_s: Mapping[WorkerId, float],
        number: Mapping[WorkerId, int],
        costs: Mapping[WorkerId, int],
    ) -> list[EventNoted]:
        """Return the news on slow workers. `number`: of tasks; `costs`: of all of them, in us."""
        verdicts = self._detector.observe([*tasks_s.values()])
        worth = [verdict for verdict in verdicts if self._is_worth_telling(verdict, costs)]
        lasting = self._lasting.observe(tasks_s, number)
        slow = [verdict.worker for verdict in worth if verdict.kind is not Kind.RECOVERED]
        busy = self._lasting.find_busy(slow, len(self._hosts))
        return [
            *(EventNoted("slow", str(verdict), verdict.worker) for verdict in worth),
            *(EventNoted("straggler", text, worker) for worker, text in lasting),
            *([EventNoted("busy", busy)] if busy else []),
        ]

    def _with_all(self) -> Balancer:
        """Return the balance once all fed workers have voted: all hosts have equal shares."""
        workers, owners, paths = self._hosts, self._view.owners, self._view.paths
        blocks = assign_at_boundary(len(owners), workers, owners, paths)
        return Balancer(self._policy, workers, blocks, paths)

    def _is_worth_telling(self, verdict: Verdict, costs: Mapping[WorkerId, int]) -> bool:
        """Return whether a verdict belongs in the event log.

        A worker that is slow now and then would fill it, so that is logged once, until the worker
        is slow in another way.
        """
        if verdict.kind is Kind.RECOVERED:
            return self._told_slow.pop(verdict.worker, False)
        if verdict.kind in PASSING and self._last_told.get(verdict.worker) in PASSING:
            return False
        lost = costs[verdict.worker] * (1 - 1 / verdict.factor)
        if verdict.kind is Kind.ONCE or lost < COSTS_MIN_US:
            return False
        self._told_slow[verdict.worker] = True
        self._last_told[verdict.worker] = verdict.kind
        return True

    def _changes(self, before: Sequence[int]) -> Iterator[str]:
        balancer = self._balancer
        changes = zip(self._hosts, before, balancer.counts, balancer.paces, strict=True)
        for worker, old, new, pace in changes:
            if old != new:
                each = f" ({pace / 1000:.3g} ms each)" if pace else ""
                ranks = "virtual rank" if new == 1 else "virtual ranks"
                yield f"worker {worker} hosts {new} {ranks} instead of {old}{each}"


@dataclass(slots=True)
class _Record:
    """Keeps the times of one worker and of its peers; both are averages that forget old steps."""

    steps: int = 0
    spent_s: float = 0.0
    usual_s: float = 0.0
    #: The time that it has cost since it became slow.
    lost_s: float = 0.0
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
        """Return a sentence on a straggler, to be logged once."""
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
