"""Finds the faults of a group of processes, and counts earlier ones. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.policies import GroupPolicy
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage, WorkerStatus


@dataclass(frozen=True, slots=True)
class GroupFault:
    """Names the reason for which a group ends: in a phrase, and in full, such as a traceback."""

    headline: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Counts the restarts of a job's groups. Times are in seconds."""

    #: The number of faults in the whole job.
    restarts: int
    began_at: float
    #: The time at which the next group may begin.
    next_at: float
    stepped_at: float
    #: The number of faults in a row without progress in between.
    in_vain: int = 0
    #: The greatest step of this group.
    step: int = 0
    #: The greatest step that a process has reported.
    furthest: int = 0
    #: The value of `furthest` when the last group ended.
    furthest_before: int = 0

    def begin(self, now: float) -> Trials:
        """Return this with a group that begins."""
        return dataclasses.replace(self, began_at=now, step=0)

    def reach(self, step: int, now: float) -> Trials:
        """Return this with a step that a script has reported."""
        if step <= self.step:
            return self
        furthest = max(self.furthest, step)
        return dataclasses.replace(self, step=step, stepped_at=now, furthest=furthest)

    def still_since(self, moved_at: float) -> float:
        """Return the time since which the group is idle; reported steps are believed."""
        return max(self.stepped_at if self.step else moved_at, self.began_at)

    def count_fault(self, now: float, policy: GroupPolicy) -> Trials:
        """Return this with one more fault; the first in a row is followed by a group at once."""
        if self.furthest:
            progress = self.furthest > self.furthest_before
        else:
            progress = now >= self.began_at + policy.steady_s
        in_vain = 1 if progress else self.in_vain + 1
        wait_s = min(policy.backoff_s * 2.0 ** min(in_vain - 2, 20), policy.backoff_max_s)
        return dataclasses.replace(
            self,
            furthest_before=self.furthest,
            restarts=self.restarts + 1,
            in_vain=in_vain,
            next_at=now + wait_s if in_vain > 1 else now,
        )


def ranks_of(view: View) -> tuple[Member, ...]:
    """Return the members that run ranks, in the order of these; the store's process is none."""
    by_worker = {member.worker: member for member in view.members}
    return tuple(by_worker[worker] for worker in view.owners)


def find_fault(view: View, roster: Roster, lost: Sequence[AgentId]) -> GroupFault | None:
    """Find the failed process of a group; of several, a process that a signal ended.

    Reports show failures as they happen, so several at once are rare: failures that follow from the
    first failure, by a closed connection for instance, arrive later.
    """
    ranks = ranks_of(view)
    ended: list[tuple[int, WorkerStatus]] = []
    for rank, member in enumerate(ranks):
        if member.agent in lost or member.worker not in roster.slots:
            return GroupFault(f"node {member.agent} with rank {rank} was lost")
        status = roster.status(member.worker, member.incarnation)
        if status is not None and status.stage in (Stage.LOST, Stage.FAILED):
            ended.append((rank, status))
        elif roster.is_dead(member.worker, member.incarnation) and status is None:
            return GroupFault(f"rank {rank} on {member.agent} was lost: its agent was restarted")
    if ended:
        rank, status = min(ended, key=lambda each: (each[1].stage is not Stage.LOST, each[0]))
        return _make_fault(rank, ranks[rank], status)
    store = view.member(view.leader)
    if store is not None and roster.is_dead(store.worker, store.incarnation):
        return GroupFault(f"the process of the store on {store.agent} was lost")
    return None


def _make_fault(rank: int, member: Member, status: WorkerStatus) -> GroupFault:
    first, _, rest = status.detail.partition("\n")
    if rest:
        return GroupFault(f"rank {rank} on {member.agent} failed", status.detail)
    return GroupFault(f"rank {rank} on {member.agent} failed: {first}")
