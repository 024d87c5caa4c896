"""Orders checkpoints before all that hold the state are taken away, and nobody can go on. Pure.

One is ordered as soon as that is known, and another one as late as there is time for it, so that
the last seconds of a notice are used for training.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.membership.formation import Situation, candidates
from holdfast.core.types import ViewNumber

TOOK_S = 2.0  # for one checkpoint, until it is known
SPARE_S = 1.0  # before the end, in which a checkpoint should be durable
ORDERS_PER_TERM = 1 << 20


class LastSaves:
    """Keeps what was ordered. `newest`: the number of the newest order; 0: none."""

    def __init__(self, term: int) -> None:
        self.newest = 0
        self.due_at: float | None = None  # when another one is to be ordered
        self._last = term * ORDERS_PER_TERM
        self._ordered_at = 0.0
        self._ordered_after = 0  # the step of the newest checkpoint by then
        self._took_s = TOOK_S
        self._ends: tuple[ViewNumber, float] | None = None  # for which they are ordered

    def order(self, durable: int, now: float) -> None:
        """Order a checkpoint at the next boundary; `durable`: the step of the newest one."""
        self._last += 1
        self.newest, self._ordered_at, self._ordered_after = self._last, now, durable

    def review(self, situation: Situation, durable: int) -> Iterator[str]:
        """Look whether the state is about to be lost; yields lines for the event log."""
        now, view = situation.now, situation.view
        if durable > self._ordered_after and self._ordered_at:
            self._took_s = max(now - self._ordered_at, 0.0)
            self._ordered_at = 0.0
        end = _end(situation)
        if view is None or end is None:
            self._ends = self.due_at = None
            return
        known = self._ends
        if known is None or known[0] != view.number or end < known[1] - SPARE_S:
            self._ends = view.number, end
            self.due_at = end - SPARE_S - 2 * self._took_s
            self.order(durable, now)
            yield f"all workers are taken away in {end - now:.3g} s: a checkpoint is made"
        elif self.due_at is not None:
            self.due_at = end - SPARE_S - 2 * self._took_s
            if now >= self.due_at:
                self.due_at = None
                self.order(durable, now)
                yield "a last checkpoint is made before all workers are taken away"


def _end(situation: Situation) -> float | None:
    """Return when the last member is taken away; None if others can go on, or nobody knows."""
    roster, members = situation.roster, situation.members
    if not members or situation.abreast or situation.feeding or candidates(situation):
        return None
    nodes = [[roster.nodes.get(name) for name in member.nodes] for member in members]
    ends = [min(n.leave_by if n is not None else float("inf") for n in each) for each in nodes]
    return max(ends) if max(ends) < float("inf") else None
