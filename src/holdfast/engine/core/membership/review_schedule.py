"""Decides when the coordinator reviews all its facts: after a change, or at a time. Pure.

Reviews of a large job cost time, and almost no report changes a decision: a node that reports is
not silent, and a job that commits steps is not stuck. A deadline that was put off by the time it is
reached is only set again.

It also learns how silent a sound node may be. A node that reports again within its lease was
wrongly suspected: its network is slow at times, or its machine is. For some time from then on it
may be silent for half as long again as it was, though never for longer than its lease. So false
suspicions become rare instead of following each other, and other nodes wait for a lost one for a
lease at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.engine.core.membership.facts import leave_time, silent_nodes
from holdfast.engine.core.membership.roster import NodeState, Roster
from holdfast.engine.core.policies import CoordinatorPolicy, LeasePolicy
from holdfast.engine.core.types import AgentId

# Least time between two reviews, for each slot of the job: several times what a review takes.
REVIEW_S = 5e-5
NEVER = float("inf")
GROWTH = 1.5  # multiple of a wrongly suspected silence that the node may take next time
LEASES = 200  # a false suspicion is remembered for this number of leases


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
        """Return the time of the last progress in the job, as far as reports show."""
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
            self._awake_since = now  # this process stood still and received no report
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
        """Record a review. `alarms`: times at which a decision changes without any event."""
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
        """Return the times at which the job will count as stuck, without progress until then."""
        return self.still_since + self._policy.patience_s, self.still_since + self._policy.hang_s

    def _set_deadline(self, now: float) -> None:
        silence = self._suspicion.alarms(now, self._awake_since)
        times = [*silence, *self._stalls(), self._decide_at]
        self.deadline = min((t for t in times if now < t < NEVER), default=None)


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Limits the silence of a node, until a time. Seconds."""

    silence_s: float
    until: float


class Suspicion:
    """Keeps the nodes that are `silent`, and what their silences have taught."""

    def __init__(self, lease: LeasePolicy, roster: Roster) -> None:
        self.silent: frozenset[AgentId] = frozenset()
        self._lease = lease
        self._roster = roster
        self._before: dict[AgentId, NodeState] = {}  # the silent nodes, as last reported
        self._tolerances: dict[AgentId, _Tolerance] = {}

    def find(self, now: float, awake_since: float) -> frozenset[AgentId]:
        """Return the nodes that are silent now; this process listens since `awake_since`."""
        found = silent_nodes(self._roster, self._lease, now, awake_since)
        nodes = self._roster.nodes
        return frozenset(
            name
            for name in found
            if name not in nodes or now >= self._suspicion_time(name, now, awake_since)
        )

    def learn(self, silent: frozenset[AgentId], now: float) -> None:
        """Take in the nodes that are silent now; the rest have reported again, or have left."""
        nodes = self._roster.nodes
        for name in sorted(self.silent - silent):
            before = self._before.pop(name, None)
            if before is not None and _is_same_agent(before, nodes[name]):
                self._bear(name, nodes[name].heard_at - before.heard_at, now)
        for name in sorted(silent):
            if name in nodes:
                self._before.setdefault(name, nodes[name])
        self.silent = silent
        borne = self._tolerances.items()
        self._tolerances = {name: each for name, each in borne if now < each.until}

    def _bear(self, name: AgentId, silence_s: float, now: float) -> None:
        """Bear longer silences of a node than this one, after which it reported again."""
        lease_s = self._lease.lease_s
        if silence_s < lease_s:  # else the suspicion was right
            longest_s = max(min(GROWTH * silence_s, lease_s), self._patience_s(name, now))
            self._tolerances[name] = _Tolerance(longest_s, now + LEASES * lease_s)

    def alarms(self, now: float, awake_since: float) -> Iterator[float]:
        """Yield the next times at which a further node will be silent, without a report from it."""
        silent, tolerances, nodes = self.silent, self._tolerances, self._roster.nodes
        plain = [
            node.heard_at
            for name, node in nodes.items()
            if name not in silent and name not in tolerances
        ]
        if plain:
            yield max(min(plain), awake_since) + self._lease.suspect_s
        for name in tolerances:
            if name not in silent:
                yield self._suspicion_time(name, now, awake_since)

    def _suspicion_time(self, name: AgentId, now: float, awake_since: float) -> float:
        return max(self._roster.heard_at(name), awake_since) + self._patience_s(name, now)

    def _patience_s(self, name: AgentId, now: float) -> float:
        """Return after what silence a node is suspected."""
        known = self._tolerances.get(name)
        if known is None or now >= known.until:
            return self._lease.suspect_s
        return known.silence_s


def _is_same_agent(before: NodeState, node: NodeState) -> bool:
    return before.report.incarnation == node.report.incarnation
