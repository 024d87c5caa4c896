"""Finds nodes that have been silent for too long, and learns how silent a sound node may be. Pure.

A node that is heard again within its lease was suspected for nothing: its network is slow at times,
or its machine is. For some time from then on it may be silent for half as long again as it was,
though never for longer than its lease. So false suspicions become rare instead of following each
other, and the others wait for a lost node for a lease at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.engine.core.membership.facts import silent_nodes
from holdfast.engine.core.membership.roster import NodeState, Roster
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.types import AgentId

GROWTH = 1.5  # silence that is borne, in multiples of the one that was wrongly suspected
LEASES = 200  # a false suspicion is remembered for this number of leases


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
        self._before: dict[AgentId, NodeState] = {}  # the silent nodes, as they were last heard
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
        """Take in which nodes are silent now: others were heard again, or have left."""
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
        """Bear longer silences of a node than this one, after which it was heard again."""
        lease_s = self._lease.lease_s
        if silence_s < lease_s:  # else the suspicion was right
            longest_s = max(min(GROWTH * silence_s, lease_s), self._patience_s(name, now))
            self._tolerances[name] = _Tolerance(longest_s, now + LEASES * lease_s)

    def alarms(self, now: float, awake_since: float) -> Iterator[float]:
        """Yield when the first of the other nodes will be silent, if none of them is heard."""
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
