"""Reads what Ray says of its nodes and actors, as placements with notices. Pure.

The words are those of ray_driver.py, which asks Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.clusters.ray.ray_waiting import RayDemand, explain_demand
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId

# An actor that may yet run is in one of these, and goes through them in this order only, since it
# is never restarted: asked for one after the other, they leave none out.
WAITING_STATES, RUNNING_STATE = ("DEPENDENCIES_UNREADY", "PENDING_CREATION"), "ALIVE"
STATES = (*WAITING_STATES, RUNNING_STATE)
DRAINED = "Ray drains its node"  # it gives no reason
NAMESPACE = "holdfast"  # all our actors are in it: their names tell the jobs apart
NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """Describes a node that is up; `drained_at`: on the clock on the wall, 0 if nobody has said.

    `free`: of its resources. `taken`: the units of the jobs that have an agent there. Ray is asked
    for these two only while an actor waits.
    """

    id: str
    name: str
    resources: Mapping[str, float]
    drains: bool = False
    drained_at: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    taken: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayActor:
    """Describes an actor that waits or runs; `node`: of these two."""

    id: str
    name: str
    state: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTables:
    nodes: tuple[RayNode, ...]
    actors: tuple[RayActor, ...]
    demands: tuple[RayDemand, ...] = ()

    def placements(self, prefix: str, now: float, wall: float, label: str = "") -> list[Placement]:
        """Return the placements of one job. `now` and `wall`: one moment on two clocks.

        `label`: of nodes, whose values are failure domains. Of an actor that has been listed in
        two states the later one counts.
        """
        nodes = {node.id: node for node in self.nodes}
        mine = {actor.id: actor for actor in self.actors if actor.name.startswith(prefix)}
        lacks = [explain_demand(d, self.nodes) for d in self.demands if d.unit == prefix]
        why = "; ".join(dict.fromkeys(lacks))
        found = [_placement(actor, nodes, now - wall, why) for actor in mine.values()]
        labels = {node.name: node.labels for node in self.nodes}
        return [replace(p, domains=_domains(labels.get(p.host, {}), label)) for p in found]

    def ids(self, hosts: Sequence[str]) -> list[str]:
        """Return the ids of the nodes that have these names."""
        return [node.id for node in self.nodes if node.name in hosts]

    def fitting(self, share: Mapping[str, float]) -> int:
        """Count the nodes that have so much of everything, in use or not."""
        return sum(
            not node.drains and all(node.resources.get(k, 0.0) >= v for k, v in share.items())
            for node in self.nodes
        )


def read_tables(answer: Mapping[str, Any]) -> RayTables:
    """Read the tables from a driver's answer. Damaged: a part is missing or odd."""
    try:
        return RayTables(
            nodes=tuple(RayNode(**each) for each in answer["nodes"]),
            actors=tuple(RayActor(**each) for each in answer["actors"]),
            demands=tuple(RayDemand(**each) for each in answer.get("demands", ())),
        )
    except (KeyError, TypeError) as error:
        raise Damaged(f"Ray's answer cannot be read: {error}") from None


def selector(nodes: Sequence[str]) -> dict[str, str]:
    """Return the label selector that keeps an actor from these nodes."""
    return {NODE_LABEL: f"!in({','.join(nodes)})"} if nodes else {}


def _domains(labels: Mapping[str, str], label: str) -> Domains:
    return (f"{label}={labels[label]}",) if labels.get(label) else ()


def _placement(
    actor: RayActor, nodes: Mapping[str, RayNode], ahead_s: float, why: str
) -> Placement:
    id_ = PlacementId(actor.name)
    if actor.state != RUNNING_STATE:  # the node that it then has is only where it waits
        return Placement(id=id_, handle=actor.id, holding=Holding.WAITING, why=why)
    node = nodes.get(actor.node)
    if node is None:  # Ray knows of a lost node a moment before it ends its actors
        return Placement(id=id_, handle=actor.id, holding=Holding.ENDED)
    notice = None
    if node.drains:
        until = node.drained_at + ahead_s if node.drained_at else None
        notice = Notice(reason=DRAINED, until=until)
    return Placement(
        id=id_, handle=actor.id, holding=Holding.RUNNING, host=node.name, notice=notice
    )
