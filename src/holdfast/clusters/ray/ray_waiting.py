"""Finds out why Ray does not start an actor that a job waits for, in a sentence for people. Pure.

Ray lists the demands that its scheduler cannot meet at present, and the free resources of nodes. It
does not name the actor of a demand, so all actors of a job that wait have the same reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.clusters.ray.ray_tables import RayNode


@dataclass(frozen=True, slots=True, kw_only=True)
class RayDemand:
    """Describes resources for which Ray has no node. `unit`: its job's; `avoid`: ids of nodes."""

    unit: str
    resources: Mapping[str, float]
    avoid: Sequence[str] = ()


def explain_demand(demand: RayDemand, nodes: Sequence[RayNode]) -> str:
    """Return why no node meets a demand, as counts of the nodes by their lack."""
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
