"""Defines what the fleet is told (events) and what it wants done (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.domains import Domains
from holdfast.core.fleet.placements import NodeSeen, Placement, PlacementId
from holdfast.core.types import Tick

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Observed:
    """The manager has listed all placements of this job.

    `asked_at`: when it was asked. What was requested after that may be missing from the list.
    """

    placements: tuple[Placement, ...]
    asked_at: float


@dataclass(frozen=True, slots=True)
class JobHeard:
    """The job's coordinator has said which nodes it knows."""

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
    """The job is over: nothing of it is needed any more."""


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
    """Have the manager end what it lists under this handle; repeated until it is gone."""

    id: PlacementId
    handle: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Have the job leave this node at a step boundary; repeated until the job says that it does.

    `until`: when the node will be taken, by the clock that `handle` is given.
    """

    id: PlacementId
    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class LabelNode:
    """Tell the job which failure domains a node is in; repeated until the job says so, too."""

    id: PlacementId
    domains: Domains


@dataclass(frozen=True, slots=True)
class Note:
    """Tell people what has happened."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is over, and the manager holds nothing of it any more."""


FleetEffect = Request | ReleasePlacement | DrainNode | LabelNode | Note | Finished
