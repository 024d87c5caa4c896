"""Defines views, the numbered decisions about membership, and orders to feed future members. Pure.

Everything here is immutable. Views are totally ordered by their numbers.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from holdfast.engine.core.domains import Domains, Path, find_paths
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.types import AgentId, Incarnation, Peer, ViewNumber, WorkerId

_WORKER = attrgetter("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Names one incarnation of a worker as a member of a view."""

    worker: WorkerId
    incarnation: Incarnation
    agent: AgentId
    #: The number of its processes.
    shards: int = 1
    #: The other nodes of a worker that is spread over several; `agent` is the first.
    further: tuple[AgentId, ...] = ()
    #: The known failure domains of `agent`.
    domains: Domains = ()

    @property
    def nodes(self) -> tuple[AgentId, ...]:
        """Return its nodes, in the order of the shards that they hold."""
        return (self.agent, *self.further)

    def holder(self, shard: int) -> AgentId:
        """Return the node that holds a shard: each holds the same number, one after the other."""
        return self.nodes[shard * len(self.nodes) // self.shards]

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Return its processes, in the order of their shards."""
        return tuple(Peer(self.worker, shard) for shard in range(self.shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWorker:
    """Names a worker that the members left behind in the middle of step `committed`.

    It keeps its state, to catch up by the gradients of the steps that it has missed.
    """

    worker: WorkerId
    incarnation: Incarnation
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """Names a worker that is brought up to date while the members train."""

    worker: WorkerId
    incarnation: Incarnation
    #: HOST:PORT where it listens.
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOrder:
    """Asks the members of `view` to feed these workers: the state of one step, and steps since.

    It is void in any other view.
    """

    #: The number grows from order to order.
    number: int
    view: ViewNumber
    followers: tuple[Follower, ...]

    def names(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this process is one of the followers."""
        return any((f.worker, f.incarnation) == (worker, incarnation) for f in self.followers)


@dataclass(frozen=True, kw_only=True)
class View:
    """Records a numbered membership decision. `members` are sorted by worker.

    It has no slots, because large jobs ask it the same questions often: each answer is kept.
    """

    number: ViewNumber
    members: tuple[Member, ...]
    #: `owners[v]` hosts virtual rank v when the view begins. Later the members may agree on other
    #: hosts (core/step/balance.py).
    owners: tuple[WorkerId, ...]
    #: The step with which the members begin.
    resume_step: int
    #: The leader stays the same as long as it survives.
    leader: WorkerId
    #: The members that did not hold the state when the view was formed.
    joiners: tuple[WorkerId, ...] = ()
    #: The members that have joined and have committed no step with other members yet.
    unproven: tuple[WorkerId, ...] = ()
    #: Workers that are no members, for which the members keep the steps that they miss.
    suspended: tuple[LateWorker, ...] = ()
    #: The joiners that catch up by steps that members have kept.
    catching_up: tuple[LateWorker, ...] = ()
    #: The joiners that were fed, and may still wait for the last step.
    fed: tuple[Follower, ...] = ()
    #: The members that host no virtual rank until another member is lost.
    spares: tuple[WorkerId, ...] = ()
    #: All known invalidations.
    invalidations: tuple[Invalidation, ...] = ()
    #: The nodes that keep pieces of the state; empty: no pieces are kept.
    ring: tuple[AgentId, ...] = ()
    #: HOST:PORT where each node of the ring serves its pieces.
    pieces_at: tuple[str, ...] = ()
    #: The pieces from which the members restore the state, if no member holds it.
    recall: Recall | None = None
    #: The states and gradients in nodes' memory that no later step was built on.
    abandoned: tuple[Invalidation, ...] = ()
    #: The reason for the change, for people.
    reason: str = ""
    #: The number of faults before, in a group of processes (core/membership/group.py).
    restarts: int = 0

    @cached_property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(m.worker for m in self.members)

    @cached_property
    def incarnations(self) -> frozenset[tuple[WorkerId, Incarnation]]:
        """Return which incarnation of each worker is a member."""
        return frozenset((m.worker, m.incarnation) for m in self.members)

    @cached_property
    def paths(self) -> Mapping[WorkerId, Path]:
        """Return for each member where its node is; near members have like paths."""
        return find_paths({m.worker: (m.agent, m.domains) for m in self.members})

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Return all processes of all members; each must be reached before the group works."""
        return tuple(peer for member in self.members for peer in member.peers)

    @cached_property
    def donors(self) -> tuple[WorkerId, ...]:
        """Members that hold the state; empty when the job starts from its initial state."""
        joiners = frozenset(self.joiners)
        return tuple(w for w in self.workers if w not in joiners)

    @property
    def base(self) -> int:
        """Return the step after which the state is that the members begin with, if none has it."""
        return self.resume_step if self.recall is None else self.recall.base

    def hosted_by(self, worker: WorkerId) -> tuple[int, ...]:
        return self._hosted.get(worker, ())

    @cached_property
    def _hosted(self) -> Mapping[WorkerId, tuple[int, ...]]:
        found: dict[WorkerId, list[int]] = {}
        for vrank, owner in enumerate(self.owners):
            found.setdefault(owner, []).append(vrank)
        return {owner: tuple(vranks) for owner, vranks in found.items()}

    def late_worker(self, worker: WorkerId) -> LateWorker | None:
        """Return the record of a member that catches up; None if it need not."""
        return next((each for each in self.catching_up if each.worker == worker), None)

    def is_late(self, worker: WorkerId) -> bool:
        """Return whether the member may lag behind the view's step."""
        return self.late_worker(worker) is not None or self.feeds(worker)

    def feeds(self, worker: WorkerId) -> bool:
        """Return whether this worker joins with a state that members fed to it before."""
        return any(each.worker == worker for each in self.fed)

    def list_hosted(self) -> dict[WorkerId, tuple[int, ...]]:
        """Return the virtual ranks of each member, as `hosted_by` does for one."""
        return {worker: self.hosted_by(worker) for worker in self.workers}

    def member(self, worker: WorkerId) -> Member | None:
        i = self.rank(worker)
        found = self.members[i] if i < len(self.members) else None
        return found if found is not None and found.worker == worker else None

    def rank(self, worker: WorkerId) -> int:
        """Return a member's position among the members."""
        members = self.members
        if 0 <= worker < len(members) and members[worker].worker == worker:
            return worker  # no worker before it has left: large jobs ask very often
        return bisect.bisect_left(members, worker, key=_WORKER)

    def includes(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this very process is a member."""
        member = self.member(worker)
        return member is not None and member.incarnation == incarnation
