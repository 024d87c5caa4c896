"""Decides on which node each server of tables runs, as one of the coordinator's decisions.

A server stays where it is until its node is lost, drained or has left. Nobody has to be fenced:
two processes of one server hold the same rows, and nobody asks the one that is not in the book.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.membership.coordinator_events import Announce
from holdfast.core.membership.facts import Facts, is_given_up
from holdfast.core.types import AgentId, ServerPlace


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Remembers the node of each server, by the server's number; `count`: how many there are.

    Servers wait for `nodes_min` nodes, or the first view, so that they are spread over these.
    """

    count: int
    nodes_min: int = 1
    nodes: Mapping[int, AgentId] = field(default_factory=dict)
    addresses: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def recall(cls, count: int, nodes_min: int, places: tuple[ServerPlace, ...]) -> ServerPlaces:
        """Return the places that a record has."""
        return cls(
            count=count,
            nodes_min=nodes_min,
            nodes={p.number: p.agent for p in places},
            addresses={p.number: p.address for p in places},
        )

    @property
    def book(self) -> tuple[ServerPlace, ...]:
        """Return where all placed servers are, for every node."""
        return tuple(
            ServerPlace(number=number, agent=agent, address=self.addresses.get(number, ""))
            for number, agent in sorted(self.nodes.items())
        )

    def review(self, facts: Facts) -> tuple[ServerPlaces, list[Announce]]:
        """Return where servers are from now on, and lines on those that move."""
        usable = self._usable_nodes(facts)
        nodes = {n: a for n, a in self.nodes.items() if not _has_lost(facts, a, usable)}
        begins = facts.view is not None or len(usable) >= self.nodes_min
        lines = []
        for number in range(self.count if usable and begins else 0):
            if number in nodes:
                continue
            loads = Counter(nodes.values())
            nodes[number] = min(usable, key=lambda name: (loads[name], usable.index(name)))
            if number in self.nodes:
                text = f"server {number} moves from {self.nodes[number]} to {nodes[number]}"
                lines.append(Announce("server", text))
        found = dataclasses.replace(self, nodes=nodes)
        return dataclasses.replace(found, addresses=found._find_addresses(facts)), lines

    def _usable_nodes(self, facts: Facts) -> list[AgentId]:
        roster = facts.roster
        return [
            name
            for name, node in sorted(roster.nodes.items())
            if not node.draining and name not in facts.silent and not node.report.draining
        ]

    def _find_addresses(self, facts: Facts) -> dict[int, str]:
        """Return where servers listen, as their nodes have told; the last known where none has."""
        found = {}
        for number, agent in self.nodes.items():
            node = facts.roster.nodes.get(agent)
            told = {s.number: s.address for s in node.report.servers} if node is not None else {}
            found[number] = told.get(number, self.addresses.get(number, ""))
        return found


def _has_lost(facts: Facts, agent: AgentId, usable: list[AgentId]) -> bool:
    """Return whether the servers of a node should run elsewhere."""
    if agent in usable or not usable:
        return False
    node = facts.roster.nodes.get(agent)
    if node is not None and (node.draining or node.report.draining):
        return True
    return is_given_up(facts, agent)
