"""Defines the messages between a job and a cluster manager about the job's nodes, as values.

A **placement** is one request to a manager: a place where one agent runs. Its id is never used
again and is also the name of its agent, so a placement that a manager lists twice, restarts or
brings back late is recognised. The virtual ranks of an agent have no influence on it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from holdfast.engine.core.domains import Domains

PlacementId = NewType("PlacementId", str)


class Holding(enum.Enum):
    """Names the states of a placement, as its manager sees it."""

    #: It is queued, or is being started.
    WAITING = "waiting"
    RUNNING = "running"
    #: It has ended; a placement that is listed no more counts the same.
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Announces that the manager is about to take a placement's host, or that it should be left.

    `until`: when it will be taken, by the clock that `handle` is given; None: that is unknown.
    """

    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Describes one placement as its manager lists it.

    `handle` is the manager's own name; two listed ones with the same id are a duplicate. `why` is
    the manager's reason for a placement that waits, or has ended, where it gives one. `stuck`:
    another request would do better, since there is an error on its host, or since a better host is
    free.
    """

    id: PlacementId
    handle: str
    holding: Holding
    #: Empty until the host is known.
    host: str = ""
    notice: Notice | None = None
    #: The failure domains of its host.
    domains: Domains = ()
    why: str = ""
    stuck: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """Describes one agent as the job's coordinator sees it.

    `members`: its workers in the view, which still count as acting. Silence without
    members is a loss: the job's own lease has decided it.
    """

    name: str
    silent: bool = False
    draining: str = ""
    members: int = 0
    #: It leaves, but other nodes have yet to copy its memory.
    needed: bool = False
    domains: Domains = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """Sets how many nodes there should be, and how patient the fleet is. Times in seconds.

    `prefix` begins the ids of all placements of the job, and only of these.
    """

    prefix: str
    nodes: int
    nodes_max: int
    #: The largest number of nodes that leave at once by choice.
    disruptions_max: int = 1
    #: A drain with a deadline begins at least this long before it.
    drain_lead_s: float = 60.0
    #: The time between two equal orders, until the job knows the first.
    again_s: float = 5.0
    #: After this time a request without an answer counts as failed.
    answer_s: float = 60.0
    #: The wait after the first failure in a row; doubled with each further one.
    retry_s: float = 2.0
    retry_max_s: float = 30.0
    #: After this number of tries a request also takes hosts that have failed.
    picky_tries: int = 3
    #: After this wait for a host a request also takes hosts that have failed.
    picky_s: float = 45.0
    #: After this time a granted placement that is not listed is given up.
    unseen_s: float = 60.0
    #: After this time a stuck placement is given up, while other placements run.
    stuck_s: float = 60.0
    #: After this time a running placement without a report of its agent is given up.
    join_s: float = 300.0
    #: After this silence of an agent without members its place is given back.
    lost_s: float = 5.0
    #: When the job is over, agents have this time to end by themselves.
    farewell_s: float = 10.0
    #: After this time an agent at work is drained if its manager reports its end.
    disowned_s: float = 30.0
    #: A host that failed is avoided for this long; doubled each time.
    avoid_s: float = 60.0
    avoid_max_s: float = 86400.0
    #: A host that served for this long without failing starts afresh.
    probation_s: float = 1800.0
