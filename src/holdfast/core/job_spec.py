"""What the operator asked for: one job's settings, and the policies that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.membership.lease import LeasePolicy
from holdfast.core.membership.restart import RestartPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPolicy:
    virtual_ranks: int
    nodes_min: int = 1  # nodes to wait for before step 0
    nodes_max: int = 1 << 20  # more than these wait until one is lost
    workers_min: int = 1  # fewer than this and the job waits at the next boundary
    lease: LeasePolicy = field(default_factory=LeasePolicy)
    settle_s: float = 120.0  # start with workers_min once the others are this late
    patience_s: float = 5.0  # a planned stop that keeps a worker waiting longer is no longer one
    hang_s: float = 1800.0  # a member others wait for, with nothing moving, is replaced after this
    speculation: float = 0.0  # share of all tasks that may be computed again for being late
    retreats_max: int = 3  # times that the job goes back without coming further in between
    restart: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Written once as job.json, and sent to every node that joins."""

    job: str  # a random name, the same on all nodes
    script: str
    args: tuple[str, ...]
    cwd: str
    election: str  # where coordinators are elected; empty: there is only the launcher's
    nproc: int  # workers of the first node
    nodes_min: int
    nodes_max: int
    virtual_ranks: int
    workers_min: int
    seed: int
    threads: int
    lease_s: float
    abandon_s: float
    hang_s: float
    losses_max: int
    store: str = ""  # where checkpoints are; empty: none are saved
    save_every: int = 0  # steps; 0: as often as pays (core/step/save_interval.py)
    save_least_s: float = 10.0
    save_most_s: float = 1800.0
    keep_last: int = 3  # checkpoints
    speculation: float = 0.02  # share of tasks computed again for being late; half of it copies
    audit: float = 0.0  # share of tasks that are computed twice, to compare
    audit_tolerance: float = 0.01  # of a gradient's norm, where hardware is not deterministic
    backup: int = 0  # workers whose results a step may do without
    fingerprint_steps: int = 64  # in which all of the state is compared; 0: it is not
    rebalance: bool = True  # slow workers host fewer virtual ranks
    scrub_rate: float = 20e6  # bytes a second at which they are verified again; 0: they are not

    @property
    def copies(self) -> float:
        """The share of tasks that may be copied before a late worker is suspended."""
        return self.speculation / 2

    @property
    def results_min(self) -> int:
        """From how many workers a step wants results, if there are as many."""
        return self.nproc * self.nodes_min - self.backup

    def lease(self) -> LeasePolicy:
        """One number sets the pace: silence of half a lease is suspicious, a fifth is margin."""
        return LeasePolicy(
            lease_s=self.lease_s,
            margin_s=self.lease_s / 5,
            suspect_s=self.lease_s / 2,
            abandon_s=self.abandon_s,
        )

    def policy(self) -> CoordinatorPolicy:
        return CoordinatorPolicy(
            virtual_ranks=self.virtual_ranks,
            nodes_min=self.nodes_min,
            nodes_max=self.nodes_max,
            workers_min=self.workers_min,
            lease=self.lease(),
            hang_s=self.hang_s,
            speculation=self.speculation - self.copies,
            restart=RestartPolicy(losses_max=self.losses_max),
        )
