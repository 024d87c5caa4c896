"""Describes a cluster, a job, the costs of a recovery, and the settings among which a plan chooses.

Every cost that differs between sources is an interval.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass, field

from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.redundancy import Redundancy
from holdfast.plan.distributions import Interval
from holdfast.plan.failure_tables import (
    OPENING_S,
    FailureModel,
    interpolate_cold_recovery_s,
)

GB = 1e9
#: OPENING_S was measured with up to this many GPUs.
OPENING_GPUS = 1_024


class Point(enum.Enum):
    """Chooses a value of each interval: the best for the job, the middle one, or the worst."""

    BEST = "best"
    MIDDLE = "middle"
    WORST = "worst"

    def of(self, bounds: Interval) -> float:
        match self:
            case Point.BEST:
                return bounds.low
            case Point.WORST:
                return bounds.high
            case _:
                return bounds.middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Describes the machines that a job may use, spares included."""

    nodes: int
    gpus_per_node: int = 8
    #: Nodes of one failure domain, such as a rack; 0: no domain is lost as a whole.
    domain_nodes: int = 0
    #: Bytes per second of a node's network, in one direction.
    network_bytes_per_s: float = 50 * GB
    #: Memory of a node that copies of the state may fill, in bytes.
    memory_bytes: float = 512 * GB
    #: Bytes per second that all nodes together write to the store; 0: there is no store.
    store_bytes_per_s: float = 20 * GB
    #: Seconds until the manager gives another node for a lost one; None: when it is repaired.
    replace_s: Interval | None = None
    #: Dollars for an hour of a GPU; 0: unknown.
    gpu_hour: float = 0.0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Describes a job."""

    #: Bytes of the model and its optimizer, once.
    state_bytes: float
    #: Seconds of a step on all GPUs, with one task for each worker.
    step_s: float
    #: GPUs that hold one copy of the state together.
    worker_gpus: int = 1
    #: Whether each worker holds only its share of the optimizer's state.
    shard_optimizer: bool = False
    #: Seconds that each task costs apart from its samples.
    task_overhead_s: float = 0.01
    #: Time to apply a step again from its logged gradients, as a share of the step.
    replay_share: float = 0.1
    #: Longest standstill of a healthy job: an evaluation, a slow batch.
    longest_still_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bounds the times of a recovery, in seconds."""

    #: From the end of a process until the other workers have stopped.
    detection_s: Interval = field(default_factory=lambda: Interval(low=0.1, high=1.0))
    #: To make the communicators again; None: by the number of GPUs, as published.
    opening_s: Interval | None = None
    #: From the start of a process until it can take part.
    start_s: Interval = field(default_factory=lambda: Interval(low=30.0, high=120.0))
    #: Standstill for a checkpoint as it was measured; None: by `copy_bytes_per_s`.
    save_stall_s: float | None = None
    #: Bytes per second of a copy from the GPUs of a node into its memory.
    copy_bytes_per_s: float = 50 * GB
    #: Times in 30 days that the whole cluster is away.
    outages: Interval = field(default_factory=lambda: Interval(low=0.0, high=1.0))
    #: Times in a day that a healthy node is silent for more than a second.
    silences: Interval = field(default_factory=lambda: Interval(low=0.01, high=0.1))

    def find_opening_s(self, gpus: int) -> Interval:
        """Return the time to make communicators among this many GPUs.

        Up to 1,024 GPUs as measured; above, up to the value of FT-HSDP's figure.
        """
        if self.opening_s is not None:
            return self.opening_s
        if gpus <= OPENING_GPUS:
            return OPENING_S
        slow_s = interpolate_cold_recovery_s(gpus)[1]
        return Interval(low=OPENING_S.low, high=max(OPENING_S.high, slow_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Is a set of settings that a plan may advise."""

    #: Tasks of each worker in a step: the virtual ranks divided by the workers.
    tasks: int = 1
    #: Nodes that are held back.
    spare_nodes: int = 0
    hot: bool = False
    redundancy: Redundancy = field(default_factory=Redundancy)
    #: Steps between two copies into memory.
    protect_every: int = 1
    #: Training between two saves; infinite: none.
    save_every_s: float = math.inf
    lease_s: float = LeasePolicy().lease_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Puts a job on a cluster whose nodes fail."""

    cluster: Cluster
    work: Work
    costs: Costs
    model: FailureModel

    # ------------------------------------------------------------ sizes

    @property
    def nodes_per_worker(self) -> int:
        return -(-self.work.worker_gpus // self.cluster.gpus_per_node)

    @property
    def workers_per_node(self) -> int:
        return max(self.cluster.gpus_per_node // self.work.worker_gpus, 1)

    def count_workers(self, choice: Choice) -> int:
        """Return the number of workers that train when no node is missing."""
        nodes = self.cluster.nodes - choice.spare_nodes
        return nodes // self.nodes_per_worker * self.workers_per_node

    def working_nodes(self, choice: Choice) -> int:
        """Return the number of nodes that train when none is missing."""
        return self.count_workers(choice) * self.nodes_per_worker // self.workers_per_node

    def is_only_in_pieces(self, choice: Choice) -> bool:
        """Return whether no other worker holds the state of a worker that is lost."""
        return self.count_workers(choice) == 1 or self.work.shard_optimizer

    @property
    def is_spread(self) -> bool:
        """Return whether a worker lies on several nodes. Then its nodes are counted, not workers.

        Nodes that a broken worker leaves behind are spares for the next loss.
        """
        return self.nodes_per_worker > 1

    @property
    def units_per_node(self) -> int:
        """Return the number of workers on a node, or 1 if workers lie on several nodes."""
        return 1 if self.is_spread else self.workers_per_node

    @property
    def hang_s(self) -> float:
        """Return a patience that no healthy step and no evaluation reaches."""
        return max(10 * self.work.step_s, 2 * self.work.longest_still_s, 30.0)

    def step_s(self, choice: Choice) -> float:
        """Return the time of a step on the working nodes, with all tasks."""
        nodes = self.cluster.nodes / self.working_nodes(choice)
        return self.work.step_s * nodes + (choice.tasks - 1) * self.work.task_overhead_s

    def efficiency(self, choice: Choice) -> float:
        """Return the speed without failures, as a share of all nodes with one task a worker."""
        return self.work.step_s / self.step_s(choice)

    # ------------------------------------------------------------ costs of a choice

    def memory_bytes(self, choice: Choice) -> float:
        """Return the memory of each node for pieces of the state."""
        redundancy, nodes = choice.redundancy, self.working_nodes(choice)
        if not redundancy.data:
            return 0.0
        # The newest state and the one before it, until every piece of the newest is in place.
        copies = 2 * redundancy.pieces_on(nodes) / redundancy.data
        return self.work.state_bytes * copies / nodes

    def network_bytes_per_s(self, choice: Choice) -> float:
        """Return the mean traffic that each node sends for pieces of the state."""
        redundancy, nodes = choice.redundancy, self.working_nodes(choice)
        if not redundancy.data:
            return 0.0
        sent = redundancy.pieces_on(nodes) / redundancy.data * (1 - 1 / nodes)
        every_s = choice.protect_every * self.step_s(choice)
        return self.work.state_bytes * sent / nodes / every_s

    def save_s(self) -> float:
        """Return the time to write a checkpoint to the store or to read it; 0 without a store."""
        if not self.cluster.store_bytes_per_s:
            return 0.0
        return self.work.state_bytes / self.cluster.store_bytes_per_s

    def steps_between_saves(self, choice: Choice) -> int:
        """Return the number of steps from one checkpoint to the next."""
        return max(round(choice.save_every_s / self.step_s(choice)), 1)

    def copy_s(self, choice: Choice) -> float:
        """Return the standstill while nodes copy their shares of the state."""
        if self.costs.save_stall_s is not None:
            return self.costs.save_stall_s
        share = self.work.state_bytes / self.working_nodes(choice)
        return share / self.costs.copy_bytes_per_s

    def feed_s(self) -> float:
        """Return the time to send a worker the state, over half of its node's network."""
        rate = self.cluster.network_bytes_per_s * self.nodes_per_worker / 2
        return self.work.state_bytes / rate


def scale_rate(scenario: Scenario, factor: float) -> Scenario:
    """Return the scenario with more failures, or fewer."""
    model = scenario.model
    rate = model.rate.times(factor)
    return dataclasses.replace(scenario, model=dataclasses.replace(model, rate=rate))
