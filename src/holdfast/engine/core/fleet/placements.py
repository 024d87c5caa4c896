"""Defines the words of a job and a cluster manager on the job's nodes, as values.

A **placement** is one request to a manager: a place where one agent runs. Its id is never used
again and is also the name of its agent, so a placement that a manager lists twice, restarts or
brings back late is recognised. The virtual ranks of an agent have nothing to do with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from holdfast.engine.core.domains import Domains

PlacementId = NewType("PlacementId", str)


class Holding(enum.Enum):
    """Names the states of a placement, as its manager sees it."""

    WAITING = "waiting"  # it is queued, or is being brought up
    RUNNING = "running"
    ENDED = "ended"  # the same as a placement that is listed no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Announces that the manager is about to take a placement's host, or that it should be left.

    `until`: when it will be taken, by the clock that `handle` is given; None: nobody has said.
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
    host: str = ""  # empty until it is known
    notice: Notice | None = None
    domains: Domains = ()  # failure domains that its host is in
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
    needed: bool = False  # though it leaves, other nodes have yet to copy its memory
    domains: Domains = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """Sets how many nodes there should be, and how patient the fleet is. Times in seconds.

    `prefix` begins the ids of all placements of the job, and only of these.
    """

    prefix: str
    nodes: int
    nodes_max: int
    disruptions_max: int = 1  # nodes that may be on their way out at once, by choice
    drain_lead_s: float = 60.0  # a drain with a deadline begins at least this long before it
    again_s: float = 5.0  # between two orders of the same, until the job knows it
    answer_s: float = 60.0  # until a request without an answer counts as failed
    retry_s: float = 2.0  # after the first failure in a row; doubled with each further one
    retry_max_s: float = 30.0
    picky_tries: int = 3  # tries of a request before it takes hosts that have failed, too
    picky_s: float = 45.0  # so does a request that waits for a host for this long
    unseen_s: float = 60.0  # a placement that was granted and is not listed is given up
    stuck_s: float = 60.0  # so is one that is stuck, while others run
    join_s: float = 300.0  # so is one that runs, and whose agent the job has not heard
    lost_s: float = 5.0  # silence of an agent without members, before its place is given back
    farewell_s: float = 10.0  # agents end by themselves when the job is over
    disowned_s: float = 30.0  # an agent works whose manager says that it has ended: it is drained
    avoid_s: float = 60.0  # a host that failed is avoided for this long; doubled each time
    avoid_max_s: float = 86400.0
    probation_s: float = 1800.0  # a host that served for this long without failing starts afresh
