"""Defines the events that a fleet takes in, and the effects that it orders."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.fleet.placements import NodeSeen, Placement, PlacementId
from holdfast.engine.core.types import Tick

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Observed:
    """The manager has listed all placements of this job.

    `asked_at`: when it was asked. Placements requested later may be missing from the list.
    """

    placements: tuple[Placement, ...]
    asked_at: float


@dataclass(frozen=True, slots=True)
class JobHeard:
    """The job's coordinator has reported the nodes that it knows."""

    nodes: tuple[NodeSeen, ...]


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """The manager has answered a request, or failed to (`problem`, for people)."""

    id: PlacementId
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NodesWanted:
    """The job should have another number of nodes from now on."""

    nodes: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over: it needs no node any more."""


FleetEvent = Observed | JobHeard | RequestAnswered | NodesWanted | JobEnded | Tick

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Request:
    """Ask the manager for a placement, anywhere but on these hosts; RequestAnswered must follow.

    The same id may be requested again when the answer was lost: that must never make a second one.
    """

    id: PlacementId
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleasePlacement:
    """Ask the manager to end the placement of this handle; repeated until it is gone."""

    id: PlacementId
    handle: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Ask the job to leave this node at a step boundary; repeated until it reports that it does.

    `until`: when the node will be taken, by the clock that `handle` is given.
    """

    id: PlacementId
    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class LabelNode:
    """Send the job a node's failure domains; repeated until the job knows them."""

    id: PlacementId
    domains: Domains


@dataclass(frozen=True, slots=True)
class Note:
    """Report an event to people."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is over, and the manager has no placement of it any more."""


FleetEffect = Request | ReleasePlacement | DrainNode | LabelNode | Note | Finished
