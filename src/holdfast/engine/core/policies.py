"""Defines settings of a job as its machines take them: sections of the job document. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePolicy:
    """Sets the times of the lease.

    `suspect_s`: silence after which a node's view is stopped, if others can go on without it.
    """

    lease_s: float = 2.0
    margin_s: float = 0.5
    suspect_s: float = 1.5
    abandon_s: float = 300.0

    @property
    def fence_s(self) -> float:
        """Return how long the coordinator waits where a node waits for `lease_s`."""
        return self.lease_s + self.margin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    losses_max: int = 30  # workers lost with no step committed in between: then the job gives up
    strikes_free: int = 2  # losses of one slot that are replaced at once
    backoff_s: float = 0.5  # after the first loss beyond these; doubled with each further one
    backoff_max_s: float = 30.0
    quarantine_s: float = 5.0  # for a worker that others cannot reach; doubled each time
    quarantine_max_s: float = 300.0
    wrong_s: float = 60.0  # for a worker that computes wrongly; doubled each time
    wrong_max_s: float = 86400.0
    probation_s: float = 60.0  # a member without a loss for this long starts afresh


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupPolicy:
    """Bounds how many members a step may do without: `workers`, none if it is 0.

    `results_min`: the fewest members whose results a step waits for, or all if there are fewer, as
    after a failure.
    """

    workers: int = 0
    results_min: int = 1

    def needed_members(self, members: int) -> int:
        """Return from how many of the view's members a step waits for results."""
        return max(members - self.workers, min(self.results_min, members))


@dataclass(frozen=True, slots=True)
class PacePolicy:
    """Bounds the interval, as the operator wants, in seconds."""

    least_s: float = 10.0
    most_s: float = 1800.0
