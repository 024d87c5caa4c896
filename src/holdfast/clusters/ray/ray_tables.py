"""Reads Ray's lists of nodes, actors and demands as placements with notices and reasons. Pure.

The driver (ray_driver.py) asks Ray for these lists. Demands are what Ray's scheduler cannot meet at
present. Ray does not name the actor of a demand, so all actors of a job that wait have the same
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId


@dataclass(frozen=True, slots=True, kw_only=True)
class RayDemand:
    """Describes resources for which Ray has no node. `unit`: its job's; `avoid`: ids of nodes."""

    unit: str
    resources: Mapping[str, float]
    avoid: Sequence[str] = ()


def explain_demand(demand: RayDemand, nodes: Sequence[RayNode]) -> str:
    """Return the reason why no node meets a demand, as counts of the nodes by their lack."""
    wanted = ", ".join(f"{key} {need:g}" for key, need in sorted(demand.resources.items()))
    kinds = [_lack(demand, node) for node in nodes]
    if all(kind is SMALL for kind in kinds):
        return f"{wanted} is infeasible in Ray: none of its {len(nodes)} nodes has so much"
    counts = [(kinds.count(kind), kind) for kind in KINDS if kind in kinds]
    found = ", ".join(f"{n} {one if n == 1 else more}" for n, (one, more) in counts)
    return f"{wanted} is pending in Ray: of its {len(nodes)} nodes {found}"


SMALL = ("is too small", "are too small")
DRAINS = ("drains", "drain")
OURS = ("has a node of the job", "have a node of the job")
AVOIDED = ("is avoided", "are avoided")
BUSY = ("is in use", "are in use")
FREE = ("is free", "are free")
KINDS = (SMALL, DRAINS, OURS, AVOIDED, BUSY, FREE)


def _lack(demand: RayDemand, node: RayNode) -> tuple[str, str]:
    if not _has(node.resources, demand):
        return SMALL
    if node.drains:
        return DRAINS
    if demand.unit in node.taken:
        return OURS
    if node.id in demand.avoid:
        return AVOIDED
    return FREE if _has(node.free, demand) else BUSY


def _has(resources: Mapping[str, float], demand: RayDemand) -> bool:
    return all(resources.get(key, 0.0) >= need for key, need in demand.resources.items())


# An actor that may yet run is in one of these, and passes through them in this order only, because
# it is never restarted: asked for one after the other, they leave none out.
WAITING_STATES, RUNNING_STATE = ("DEPENDENCIES_UNREADY", "PENDING_CREATION"), "ALIVE"
STATES = (*WAITING_STATES, RUNNING_STATE)
DRAINED = "Ray drains its node"  # it gives no reason
NAMESPACE = "holdfast"  # all our actors are in it: their names begin with the job's
NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """Describes a node that is up; `drained_at`: on the clock on the wall, 0 if it is not known.

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
