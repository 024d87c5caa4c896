"""Decides the numbers of workers that compute and that are held back as spares. Pure.

Spares are processes that have built the model and wait. Warm ones hold no state: they are fed once
a member is lost or is to leave. Hot ones are members that host no task: they apply each step's
gradient, and take over the tasks of a lost member without any transfer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist

from holdfast.engine.core.membership.changes import Change, WantSpares
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.view_making import Room
from holdfast.engine.core.policies import WORKER_MTBF_S
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage

FORMER = 0.001  # the guess weighs as much as so few losses: observed ones soon weigh more
REPLACE_S = 60.0  # to replace a worker, before anything is observed
NORMAL_FROM = 500.0  # from this mean on a Poisson distribution is taken to be normal
SPARES_MAX = 1 << 20
REPLACED_MAX = 8  # times to replace a worker that are remembered
ENOUGH = 0.99  # share of the time for which the spares must suffice


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePolicy:
    """Sets the number of spares. `spares`: on each node; None: as many as are needed."""

    virtual_ranks: int
    spares: int | None = 0
    hot: bool = False


def spares_needed(mean: float, enough: float = ENOUGH) -> int:
    """Return the largest number of lost workers that are not replaced yet, for this share of time.

    `mean`: that number's mean. Losses are taken to be independent, so it is Poisson distributed.
    """
    if mean > NORMAL_FROM:
        return math.ceil(NormalDist(mean, math.sqrt(mean)).inv_cdf(enough))
    count = 0
    term = total = math.exp(-mean)
    while total < enough:
        count += 1
        term *= mean / count
        total += term
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Keeps statistics of losses, and the number of places."""

    policy: ReservePolicy
    #: The time of the last review; at first, when the coordinator began.
    looked_at: float
    #: The most that nodes have offered at once.
    places: int = 0
    #: The spares in the job, if their number is found out here.
    wanted: int | None = None
    #: The time of work, summed over all workers.
    worked_s: float = 0.0
    losses: int = 0
    #: The lost workers, with the time and the lost incarnation.
    lost: tuple[tuple[WorkerId, float, Incarnation], ...] = ()
    #: The times of the last replacements.
    replaced_s: tuple[float, ...] = ()

    def count_loss(self, worker: WorkerId, roster: Roster, now: float) -> Reserve:
        """Return this with one more worker lost."""
        found, slot = dataclasses.replace(self, losses=self.losses + 1), roster.slots.get(worker)
        if slot is None or any(worker == known for known, _, _ in self.lost):
            return found
        return dataclasses.replace(found, lost=(*self.lost, (worker, now, slot.incarnation)))

    def review(self, roster: Roster, view: View | None, now: float) -> tuple[Reserve, list[Change]]:
        """Look at the present nodes; return how many spares each of them should have."""
        plan: list[Change] = []
        members = len(view.members) - len(view.spares) if view is not None else 0
        placed = [roster.nodes[name] for name in roster.first_nodes if name in roster.nodes]
        offered = sum(node.report.slots - node.report.spares for node in placed)
        places = max(self.places, members, offered)  # members: of a coordinator before this one
        found = self if places == self.places else dataclasses.replace(self, places=places)
        if self.policy.spares is not None:
            return found, plan
        found = found._look(roster, now)
        wanted, why = found._count_needed(len(roster.slots))
        if wanted != self.wanted:
            plural = "spare is" if wanted == 1 else "spares are"
            plan.append(Announce("node", f"{wanted} {plural} kept on all nodes together: {why}"))
        for i, node in enumerate(placed):
            share = wanted // len(placed) + (i < wanted % len(placed))
            plan += [WantSpares(node.report.agent, share)] if share != node.spares_wanted else []
        return dataclasses.replace(found, wanted=wanted), plan

    def _look(self, roster: Roster, now: float) -> Reserve:
        """Return this with the work done and the replacements made since the last look."""
        lost, replaced_s = [], list(self.replaced_s)
        for worker, at, incarnation in self.lost:
            status = roster.newest.get(worker)
            back = status is not None and status.incarnation >= incarnation
            if worker not in roster.slots:
                continue
            if back and status is not None and status.stage is Stage.READY:
                replaced_s.append(now - at)
            else:
                lost.append((worker, at, incarnation))
        worked_s = self.worked_s + (now - self.looked_at) * len(roster.slots)
        return dataclasses.replace(
            self,
            worked_s=worked_s,
            looked_at=now,
            lost=tuple(lost),
            replaced_s=tuple(replaced_s[-REPLACED_MAX:]),
        )

    def _count_needed(self, workers: int) -> tuple[int, str]:
        rate = (self.losses + FORMER) / (self.worked_s + FORMER * WORKER_MTBF_S)
        replace_s = max(self.replaced_s, default=REPLACE_S)
        found = spares_needed(rate * workers * replace_s)
        why = (
            f"{self.losses} losses in {self.worked_s / 3600:.3g} hours of workers, and "
            f"{replace_s:.3g} s to replace one: more are away for less than {1 - ENOUGH:.0%} of "
            "the time"
        )
        return found, why

    def room(self) -> Room:
        """Return the largest number of members."""
        policy = self.policy
        if policy.spares == 0:
            return Room(hosts=policy.virtual_ranks)
        spares = SPARES_MAX if policy.hot else 0  # no more than there are
        return Room(hosts=min(max(self.places, 1), policy.virtual_ranks), spares=spares)
