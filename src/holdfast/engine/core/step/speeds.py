"""Judges each step's times, on all members of a view alike: slow workers, and hosts. Pure.

Every member observes the same numbers in the same order, so all of them hold the same assignment;
only the leader looks for slow workers, and reports them to the job's event log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.engine.core.assignment import assign_at_boundary
from holdfast.engine.core.ground.events import EventNoted, Wait
from holdfast.engine.core.step.balance import BalancePolicy, Balancer
from holdfast.engine.core.step.lasting import LastingSlowness
from holdfast.engine.core.step.link_detector import COSTS_MIN_US, LinkDetector
from holdfast.engine.core.step.stragglers import Detector, Kind, Verdict
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

PASSING = (Kind.INTERMITTENT, Kind.PERIODIC)


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
        self._last_told: dict[WorkerId, Kind] = {}  # how each was slow when that was last told
        idle = [w for w in view.unproven if w not in view.owners and w not in view.spares]
        self._newly_fed = bool(idle) and len(self._hosts) <= len(view.owners)

    @property
    def owners(self) -> tuple[WorkerId, ...]:
        """Return who hosts each virtual rank from the next step on."""
        return self._balancer.owners

    def observe(
        self, compute_us: Sequence[int], leads: bool, waits: Sequence[Wait] = ()
    ) -> list[EventNoted]:
        """Take in the times of each member's own tasks, and its waits for others (not simulated).

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
        """Return the balance once all fed workers have voted: they host as many as others do."""
        workers, owners, paths = self._hosts, self._view.owners, self._view.paths
        blocks = assign_at_boundary(len(owners), workers, owners, paths)
        return Balancer(self._policy, workers, blocks, paths)

    def _is_worth_telling(self, verdict: Verdict, costs: Mapping[WorkerId, int]) -> bool:
        """Return whether a verdict belongs in the event log.

        A worker that is slow now and then would fill it, so that is told once, until the worker is
        slow in another way.
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
