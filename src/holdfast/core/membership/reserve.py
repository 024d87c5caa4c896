"""Decides how many workers are held back as spares, and how many compute. Pure.

Spares are processes that have built the model and wait. Warm ones hold no state: they are fed once
a member is lost or is to leave. Hot ones are members that host no task: they apply each step's
gradient, and take over what a lost member hosted with nothing to transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from holdfast.core.membership.roster import Roster
from holdfast.core.membership.view_making import Room
from holdfast.core.types import Incarnation, Stage, View, WorkerId

# 419 unexpected interruptions in 54 days of 16,384 GPUs: "The Llama 3 Herd of Models" (2024), 3.3.4
LOSS_EVERY_S = 54 * 86_400.0 * 16_384 / 419  # of one worker's time, before anything is observed
FORMER = 0.001  # losses that this counts for: what is observed soon weighs more
REPLACE_S = 60.0  # to replace a worker, before anything is observed
NORMAL_FROM = 500.0  # from this mean on a Poisson distribution is taken to be normal
SPARES_MAX = 1 << 20
ENOUGH = 0.99  # of the time, that many spares or fewer are needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePolicy:
    """Says how many spares there are. `spares`: on each node; None: as many as are needed."""

    virtual_ranks: int
    spares: int | None = 0
    hot: bool = False


def spares_needed(mean: float, enough: float = ENOUGH) -> int:
    """Return how many workers are lost and not yet replaced, or fewer, for this share of time.

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


class Reserve:
    """Keeps what is known of losses, and who has a place. It starts at the time `now` (s)."""

    def __init__(self, policy: ReservePolicy, now: float) -> None:
        self._policy = policy
        self._places = 0  # the most that nodes have offered at once
        self._wanted: int | None = None  # spares in the job, if their number is found out here
        self._looked_at = now
        self._worked_s = 0.0  # summed over all workers
        self._losses = 0
        self._lost: dict[WorkerId, tuple[float, Incarnation]] = {}  # when, and what came after
        self._replaced_s: list[float] = []  # how long it took

    def lost(self, worker: WorkerId, roster: Roster, now: float) -> None:
        """Note that a worker was lost."""
        self._losses += 1
        slot = roster.slots.get(worker)
        if slot is not None:
            self._lost.setdefault(worker, (now, slot.incarnation))

    def review(self, roster: Roster, view: View | None, now: float) -> Iterator[str]:
        """Look at who is there; yields a line when another number of spares is wanted."""
        if view is not None:  # of a coordinator that has begun anew
            self._places = max(self._places, len(view.members) - len(view.spares))
        placed = [roster.nodes[name] for name in roster.first_nodes if name in roster.nodes]
        self._places = max(self._places, sum(node.offered - node.spares for node in placed))
        if self._policy.spares is not None:
            return
        self._worked_s += (now - self._looked_at) * len(roster.slots)
        self._looked_at = now
        for worker, (at, incarnation) in list(self._lost.items()):
            status = roster.newest.get(worker)
            back = status is not None and status.incarnation >= incarnation
            if worker not in roster.slots:
                del self._lost[worker]
            elif back and status is not None and status.stage is Stage.READY:
                self._replaced_s.append(now - at)
                del self._lost[worker]
        wanted, why = self._needed(len(roster.slots))
        if wanted != self._wanted:
            self._wanted = wanted
            plural = "spare is" if wanted == 1 else "spares are"
            yield f"{wanted} {plural} kept on all nodes together: {why}"
        for i, node in enumerate(placed):
            node.spares_wanted = wanted // len(placed) + (i < wanted % len(placed))

    def _needed(self, workers: int) -> tuple[int, str]:
        rate = (self._losses + FORMER) / (self._worked_s + FORMER * LOSS_EVERY_S)
        replace_s = max(self._replaced_s[-8:], default=REPLACE_S)
        found = spares_needed(rate * workers * replace_s)
        why = (
            f"{self._losses} losses in {self._worked_s / 3600:.3g} hours of workers, and "
            f"{replace_s:.3g} s to replace one: more are away for less than {1 - ENOUGH:.0%} of "
            "the time"
        )
        return found, why

    def room(self) -> Room:
        """Return how many members there may be."""
        policy = self._policy
        if policy.spares == 0:
            return Room(hosts=policy.virtual_ranks)
        spares = SPARES_MAX if policy.hot else 0  # no more than there are
        return Room(hosts=min(max(self._places, 1), policy.virtual_ranks), spares=spares)
