"""Defines settings of a job as its machines take them: sections of the job document. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.engine.core.redundancy import Redundancy

# Until a job has seen losses of its own: 419 unexpected interruptions of 16,384 GPUs in 54 days
# (Llama 3, arXiv:2407.21783, Table 5), as seconds of one worker for each.
WORKER_MTBF_S = 16_384 * 54 * 86_400 / 419


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePolicy:
    """Sets the times of the lease.

    `suspect_s`: the silence after which a node's view is stopped, if other nodes can continue.
    """

    lease_s: float = 2.0
    margin_s: float = 0.5
    suspect_s: float = 1.5
    abandon_s: float = 300.0

    @property
    def fence_s(self) -> float:
        """Return the time that the coordinator waits where a node waits for `lease_s`."""
        return self.lease_s + self.margin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Sets how lost workers are replaced, and when the job gives up."""

    #: After more losses with no step committed in between the job gives up.
    losses_max: int = 30
    #: The losses of one slot that are replaced at once.
    strikes_free: int = 2
    #: The wait after the first loss beyond these; doubled with each further one.
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    #: The quarantine of a worker that other members cannot reach; doubled each time.
    quarantine_s: float = 5.0
    quarantine_max_s: float = 300.0
    #: The quarantine of a worker that computes wrongly; doubled each time.
    wrong_s: float = 60.0
    wrong_max_s: float = 86400.0
    #: A member without a loss for this long starts afresh.
    probation_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupPolicy:
    """Sets the number of members whose results a step may drop: `workers`, none if it is 0.

    `results_min`: the fewest members whose results a step waits for, or all if there are fewer, as
    after a failure.
    """

    workers: int = 0
    results_min: int = 1

    def needed_members(self, members: int) -> int:
        """Return the number of members for whose results a step waits."""
        return max(members - self.workers, min(self.results_min, members))


@dataclass(frozen=True, slots=True)
class PacePolicy:
    """Bounds the interval, as the operator wants, in seconds."""

    least_s: float = 10.0
    most_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationPolicy:
    """Sets how nodes keep the state in their memory (core/replica/replicating.py)."""

    redundancy: Redundancy = field(default_factory=Redundancy)
    #: Steps from one replicated state to the next; 0: as many as cost the least time.
    every: int = 0
    #: No worker holds the whole state.
    is_sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Keeps the settings for groups of processes (core/membership/group.py)."""

    nodes_min: int = 1
    nodes_max: int = 1
    #: The spares on each node; None: one for each process that works there.
    spares: int | None = None
    #: The restarts in a row, without progress in between, after which the job gives up.
    restarts_max: int = 3
    #: A group that has lived this long has made progress.
    steady_s: float = 600.0
    #: A group that is idle for this long hangs.
    hang_s: float = 1800.0
    #: Wait this long after the last arrival before forming a smaller group.
    settle_s: float = 3.0
    #: Nodes that are not ready after this time are not waited for.
    late_s: float = 120.0
    #: The wait before the second restart in a row; doubled with each further one.
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    lease: LeasePolicy = field(default_factory=LeasePolicy)

    def count_working(self, slots: int) -> int:
        """Return the number of a node's slots that work: no spare and no store has them."""
        return (slots - 1) // 2 if self.spares is None else slots - 1 - self.spares


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPolicy:
    """Keeps the settings for the coordinator's decisions."""

    virtual_ranks: int
    #: The nodes to wait for before step 0.
    nodes_min: int = 1
    #: Further nodes wait until one is lost.
    nodes_max: int = 1 << 20
    #: With fewer workers the job waits at the next boundary.
    workers_min: int = 1
    lease: LeasePolicy = field(default_factory=LeasePolicy)
    #: Start with `workers_min` once the other workers are this late.
    settle_s: float = 120.0
    #: After this long, treat a planned stop as a failure.
    patience_s: float = 5.0
    #: The time for a last checkpoint; schedulers give 30 s between signal and kill.
    grace_s: float = 25.0
    #: Without any progress for this long, a member for which other members wait is replaced.
    hang_s: float = 1800.0
    #: The share of all tasks that may be computed again for being late.
    speculation: float = 0.0
    #: The spares on each node; None: the number that losses make worth it.
    spares: int | None = 0
    #: Spares are members, and hold the state.
    hot_spares: bool = False
    #: The processes of each worker.
    procs: int = 1
    #: The nodes of each worker.
    spread: int = 1
    #: Each worker holds the whole state, not only its share.
    replicated: bool = True
    #: Workers receive the state while the members train, and join when they have it.
    feeds: bool = False
    #: The job has checkpoints.
    keeps: bool = False
    #: The pieces of the state in the nodes' memory.
    redundancy: Redundancy = field(default_factory=Redundancy)
    #: The number of servers of the hosted service.
    servers: int = 0
    #: The times that the job may go back without progress in between.
    retreats_max: int = 3
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def shards_told(self) -> int:
        """Return the number of shards that nodes list separately: no node holds all of them."""
        return self.procs if self.spread > 1 else 1
