"""Decides when the coordinator reviews all its facts: after a change, or at a time.

Reviews of a large job cost time, and almost no report changes anything: a node that speaks is not
silent, and a job whose steps go on is not stuck. A deadline that has moved on when it comes is only
set again.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.core.job_spec import CoordinatorPolicy
from holdfast.engine.core.membership.facts import leave_time
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.suspicion import Suspicion
from holdfast.engine.core.types import AgentId

# Least time between two reviews, for each slot of the job: several times what a review takes.
REVIEW_S = 5e-5
NEVER = float("inf")


class Agenda:
    """Keeps the `deadline` of the next review, and which nodes were silent at the last one."""

    def __init__(self, policy: CoordinatorPolicy, roster: Roster, now: float) -> None:
        self.deadline: float | None = now
        self._policy = policy
        self._roster = roster
        self._suspicion = Suspicion(policy.lease, roster)
        self._still_since = now
        self._awake_since = now
        self._changed = True  # something has changed since the last review
        self._reviewed_at = -NEVER
        self._rests_until = -NEVER
        self._decide_at = NEVER

    @property
    def silent(self) -> frozenset[AgentId]:
        """Return the nodes that were silent at the last review."""
        return self._suspicion.silent

    @property
    def still_since(self) -> float:
        """Return since when nothing has moved in the job, as far as one hears."""
        return max(self._still_since, self._roster.moved_at, self._awake_since)

    def stir(self, now: float) -> None:
        """Record that something moves: the job does not stand still."""
        self._still_since = now

    def change(self, now: float, *, at_once: bool = False) -> None:
        """Record a change that may change a decision. A large job's changes come in floods."""
        self._changed = True
        if at_once:
            self._rests_until = now
        due = max(now, self._rests_until)
        self.deadline = due if self.deadline is None else min(due, self.deadline)

    def is_due(self, now: float) -> bool:
        """Return whether to review now; then `record_review` must follow."""
        if self.deadline is None or now < self.deadline:
            return False
        if now > self.deadline + self._policy.lease.suspect_s / 2:
            self._awake_since = now  # this process stood still and heard nobody
        silent = self._suspicion.find(now, self._awake_since)
        still = any(self._reviewed_at < t <= now for t in self._stalls())
        if self._changed or silent != self.silent or now >= self._decide_at or still:
            if now < self._rests_until:  # a large job's nodes fall silent one after the other
                self.deadline = self._rests_until
                return False
            self._suspicion.learn(silent, now)
            self._changed = False
            return True
        self._set_deadline(now)
        return False

    def record_review(self, now: float, alarms: Iterable[float]) -> None:
        """Record a review. `alarms`: times that change a decision, whatever comes before them."""
        lease, roster = self._policy.lease, self._roster
        unheard = [roster.started_at, *(roster.heard_at(name) for name in sorted(self.silent))]
        fences = [t + lease.fence_s for t in unheard]
        losses = [t + lease.abandon_s + lease.margin_s for t in unheard]
        ends = [leave_time(roster, name) + lease.margin_s for name in sorted(self.silent)]
        returns = [p.respawn_at for p in roster.slots.values() if p.respawn_at is not None]
        times = [*alarms, *fences, *losses, *ends, *returns]
        self._decide_at = min((t for t in times if t > now), default=NEVER)
        self._reviewed_at = now
        self._rests_until = now + len(roster.slots) * REVIEW_S
        self._set_deadline(now)

    def _stalls(self) -> tuple[float, float]:
        """Return when the job will have stood still for too long, if nothing moves by then."""
        return self.still_since + self._policy.patience_s, self.still_since + self._policy.hang_s

    def _set_deadline(self, now: float) -> None:
        silence = self._suspicion.alarms(now, self._awake_since)
        times = [*silence, *self._stalls(), self._decide_at]
        self.deadline = min((t for t in times if now < t < NEVER), default=None)
