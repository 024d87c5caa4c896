"""Defines the job document: every setting of a job, with default and help, in one frozen value.

A setting is one field of one section below. The options of `holdfast run`, its configuration file
and the checks follow from the fields. The same document is kept in the run directory, published in
etcd, sent to nodes that join and read by every worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.engine.core.policies import (
    BackupPolicy,
    CoordinatorPolicy,
    GroupPolicy,
    LeasePolicy,
    PacePolicy,
    RestartPolicy,
)
from holdfast.engine.core.redundancy import Redundancy, read_redundancy
from holdfast.engine.core.settings import Setting, sections_of, setting, settings_of
from holdfast.engine.core.types import ProcessRole

PROCESSES_MAX = 1024  # processes of one kind on a node; more would exhaust it without a word
VIRTUAL_MAX = 100_000  # every view names the owner of each virtual rank
NODES_MAX = 100_000
SERVERS_MAX = 1024
STALENESS_MAX = 64  # steps
TABLES = "tables"  # the hosted service of holdfast.tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Sets how many workers compute the steps, and what their result depends on."""

    nproc: int = setting(
        1,
        "workers to start on this node, and by default on each further one",
        metavar="N",
        least=1,
        most=PROCESSES_MAX,
    )
    virtual: int | None = setting(
        None,
        "virtual ranks that every step is divided into: the result depends on their number, never "
        "on that of the workers; auto: one for each worker that the job starts with",
        metavar="V",
        least=1,
        most=VIRTUAL_MAX,
    )
    procs: int = setting(
        1,
        "processes that each worker consists of, which share one model (FSDP, tensor parallelism)",
        flag="--procs-per-worker",
        metavar="G",
        least=1,
        most=PROCESSES_MAX,
    )
    spread: int = setting(
        1,
        "nodes over which the processes of each worker are spread, the same number on each",
        flag="--nodes-per-worker",
        metavar="N",
        least=1,
        most=PROCESSES_MAX,
    )
    spares: int | None = setting(
        0,
        "further workers to start on each node, which wait until one that trains is lost or "
        "leaves; auto: the number for the whole job that its rate of losses makes worth it",
        metavar="N|auto",
        least=0,
        most=PROCESSES_MAX,
    )
    hot_spares: bool = setting(
        False,
        "let spares apply each step as well, without computing tasks, so that they take over "
        "with nothing to transfer",
    )
    min: int = setting(
        1,
        "wait at the end of a step while fewer workers than this are alive",
        flag="--min-workers",
        metavar="M",
        least=1,
        most=VIRTUAL_MAX,
    )
    seed: int = setting(0, "seed of everything random in the job", metavar="SEED", least=0)
    threads: int = setting(
        1,
        "CPU threads of each worker; the result depends on them, because CPU kernels add up "
        "thread by thread",
        metavar="T",
        least=1,
        most=PROCESSES_MAX,
    )
    fork: bool = setting(
        True,
        "start workers by forking a process that has imported PyTorch, which takes milliseconds "
        "instead of seconds; nodes with GPUs do so only for --redundancy, --shard-optimizer and "
        "--compat",
    )
    shard_optimizer: bool = setting(
        False,
        "let each worker keep the optimizer's state of its share of the parameters only (ZeRO-1); "
        "needs --redundancy or --store, as a lost worker's share is made again from there",
    )
    losses_max: int = setting(
        30,
        "give up after losing this many workers without completing a step in between; workers on "
        "nodes that have announced when they are taken away do not count",
        metavar="K",
        least=1,
    )
    hang_s: float = setting(
        1800.0,
        "replace a worker that the others wait for once nothing has moved for this many seconds",
        metavar="SECONDS",
        above=0,
    )

    @property
    def procs_on_node(self) -> int:
        """Return the number of a worker's processes on each of its nodes."""
        return self.procs // self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Sets which machines take part, and how long they wait for each other and a coordinator."""

    min: int = setting(
        1,
        "nodes to wait for before the first step; further ones join with `holdfast agent`",
        flag="--nodes-min",
        metavar="A",
        least=1,
        most=NODES_MAX,
    )
    max: int | None = setting(
        None,
        "let at most this many nodes take part and others wait until one is lost; auto: as many "
        "as the job waits for",
        flag="--nodes-max",
        metavar="B",
        least=1,
        most=NODES_MAX,
    )
    election: str = setting(
        "",
        "elect the coordinator in etcd, so that others can take over with `holdfast coordinator`: "
        "etcd://HOST[:PORT],.../JOB",
        metavar="URL",
    )
    lease_s: float = setting(
        2.5,
        "stop the workers of a node that has neither heard from the coordinator nor completed a "
        "step for this many seconds; losing a node delays the job by at most twice as long",
        metavar="SECONDS",
        above=0,
    )
    abandon_s: float = setting(
        300.0,
        "stop workers that have had no coordinator for this many seconds; silent nodes that alone "
        "hold the job's state are waited for as long",
        metavar="SECONDS",
        above=0,
    )
    join_rate: int = setting(
        500,
        "megabytes a second that each worker sends at most to workers that join, while it trains; "
        "0: training always waits until they have received the state",
        metavar="MB",
        least=0,
    )
    join_pause: int = setting(
        32,
        "let training wait as well while a joining worker receives the state of a model of up to "
        "this many megabytes, which takes less than to feed it step by step",
        metavar="MB",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Sets where and how often the state is saved, to survive the loss of every process."""

    store: str = setting(
        "",
        "save checkpoints in a place that every node can reach: DIR, s3://BUCKET/PREFIX, or "
        "ec:K+M:STORE,STORE,... (K + M of them); empty: save none",
        metavar="STORE",
    )
    every: int | None = setting(
        None,
        "steps between two saves; auto: as often as pays, given what a save costs and how often "
        "the state of all workers is lost",
        flag="--save-every",
        metavar="N|auto",
        least=1,
    )
    between_s: tuple[float, float] = setting(
        (10.0, 1800.0),
        "shortest and longest time between two saves, in seconds, when their interval is auto",
        flag="--save-between",
        metavar=("LEAST", "MOST"),
        above=0,
    )
    keep_last: int = setting(3, "keep this many of the newest checkpoints", metavar="K", least=1)
    scrub_rate: float = setting(
        20.0,
        "verify the kept checkpoints once an hour, and pieces in the nodes' memory all the time, "
        "reading this many megabytes a second, and repair those that have parity; 0: never",
        metavar="MB",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Sets what the job does about workers that are slow or late."""

    rebalance: bool = setting(
        True,
        "give slow workers fewer virtual ranks, if there are more virtual ranks than workers; the "
        "result stays the same",
    )
    speculation_budget: float = setting(
        0.02,
        "share of all tasks that other workers may compute again because a worker is late; "
        "0: wait for it, however long it takes",
        metavar="SHARE",
        least=0,
        most=1,
    )
    backup: int = setting(
        0,
        "discard what the last B workers compute of a step instead of waiting for them: results "
        "are no longer bit-exact",
        metavar="B",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentErrors:
    """Sets how the job finds machines that compute wrongly or corrupt their memory."""

    audit: float = setting(
        0.0,
        "share of all tasks that a second worker computes as well, to compare the bits; 0.01 "
        "costs one percent of the computing",
        metavar="SHARE",
        least=0,
        most=1,
    )
    audit_tolerance: float = setting(
        0.01,
        "how far two results of a task may differ on hardware that proves not to be "
        "deterministic, as a share of the gradient's norm; 0: audit nothing there",
        metavar="SHARE",
        least=0,
        below=1,
    )
    fingerprint_steps: int = setting(
        64,
        "compare every byte of the model and the optimizer between workers once in this many "
        "steps; 1: in every step; 0: never",
        metavar="STEPS",
        least=0,
    )
    repeat_steps: int = setting(
        64,
        "let a worker compute one task of the job twice in this many steps, and its first one, to "
        "see that the script's tasks depend on nothing but their inputs; 0: never",
        metavar="STEPS",
        least=0,
    )
    digest_steps: int = setting(
        64,
        "record digests of each task's gradient and of their sum that cover every byte once in "
        "this many steps, for `holdfast compare` and `replay`; 1: in every step; 0: never",
        metavar="STEPS",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Sets what the job does about training data that are not as they should be."""

    bad_samples_max: int = setting(
        0,
        "leave out at most this many bad records, where the script allows it, and stop the job at "
        "one more; 0: stop at the first",
        flag="--bad-samples-max",
        metavar="N",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Sets how nodes protect the state in their memory, to survive the loss of every process."""

    redundancy: str = setting(
        "none",
        "keep the state, and the gradients of the steps since, in the memory of several nodes: "
        "none, replicate:R (R copies) or rs:K+M (K + M pieces; any K are enough)",
        metavar="none|replicate:R|rs:K+M",
    )
    every: int | None = setting(
        20,
        "steps between two states that are kept there; a longer log of gradients takes more "
        "memory, and longer to apply; auto: as many as cost the least time, 100 at most",
        flag="--protect-every",
        metavar="N",
        least=1,
    )
    budget: int | None = setting(
        None,
        "megabytes of each node's memory that this may take; auto: half of the free memory",
        flag="--memory-budget",
        metavar="MB",
        least=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Sets the servers of a hosted service, which is holdfast.tables unless another is named."""

    count: int = setting(
        0,
        "processes that hold the rows of tables, spread over the nodes; 0: each worker holds all "
        "rows; the result stays the same",
        flag="--servers",
        metavar="S",
        least=0,
        most=SERVERS_MAX,
    )
    replicas: int = setting(
        1,
        "servers that hold each row, so that one less may be lost at once",
        flag="--replicas",
        metavar="R",
        least=1,
        most=SERVERS_MAX,
    )
    staleness: int = setting(
        0,
        "let a step read rows without the updates of the last T steps before it, so that it need "
        "not wait for these; the result depends on T, and on nothing else",
        flag="--staleness",
        metavar="T",
        least=0,
        most=STALENESS_MAX,
    )
    service: str = setting(
        TABLES,
        "the hosted service that the servers run: embedding tables, or a plugin's service",
        flag="--hosted-service",
        metavar="NAME",
    )
    copy_rate: int = setting(
        500,
        "megabytes a second that each server sends at most to others that copy its rows, since "
        "they have started again or are new; 0: no limit",
        flag="--copy-rate",
        metavar="MB",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compat:
    """Sets how a script written for torchrun is run: all its processes restart after a failure."""

    enabled: bool = setting(
        False,
        "run a script that was written for torchrun as it is: with RANK, WORLD_SIZE, MASTER_ADDR "
        "and so on in its environment, and a restart of all its processes when one fails",
        flag="--compat",
    )
    restarts_max: int = setting(
        3,
        "give up when a group of processes fails after this many restarts without progress in "
        "between",
        metavar="N",
        least=0,
    )
    steady_s: float = setting(
        600.0,
        "a group that has run for this many seconds has made progress, unless its script writes "
        "its step to the file $HOLDFAST_HEARTBEAT: then a step further than any before counts",
        metavar="SECONDS",
        least=0,
    )
    end_s: float = setting(
        30.0,
        "kill a process this many seconds after the signal that asks it to end, so that its script "
        "can save: SIGTERM after the failure of another one, else the signal that ends the job; 0: "
        "kill it at once",
        metavar="SECONDS",
        least=0,
    )
    waiting: int | None = setting(
        None,
        "processes that wait on every node, torch imported, to take part after a failure; auto: "
        "as many as work there",
        metavar="N",
        least=0,
    )
    preload: str = setting(
        "",
        "modules to import before a process is told its rank, besides PyTorch: NAME,NAME,...; not "
        "those that read the rank or use a GPU as they are imported",
        metavar="NAMES",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Defines a job; the same on all its nodes for its whole life."""

    #: A random name: the job's identity, for as long as it lives and wherever it runs.
    job: str
    #: The folder where the script runs.
    cwd: str
    script: str
    args: tuple[str, ...] = ()
    workers: Workers = field(default_factory=Workers)
    nodes: Nodes = field(default_factory=Nodes)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    stragglers: Stragglers = field(default_factory=Stragglers)
    silent_errors: SilentErrors = field(default_factory=SilentErrors)
    data: DataSettings = field(default_factory=DataSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    servers: ServerSettings = field(default_factory=ServerSettings)
    compat: Compat = field(default_factory=Compat)

    @property
    def workers_at_start(self) -> int:
        """Return the number of workers for which the job waits before its first step."""
        return self.workers.nproc * (self.nodes.min // self.workers.spread)

    @property
    def virtual_ranks(self) -> int:
        """Return V, the number of fixed shares into which every step falls."""
        virtual = self.workers.virtual
        return self.workers_at_start if virtual is None else virtual

    @property
    def nodes_max(self) -> int:
        """Return the largest number of nodes that may take part at once."""
        return self.nodes.min if self.nodes.max is None else self.nodes.max

    @property
    def roles_per_node(self) -> Mapping[ProcessRole, int]:
        """Return the number of processes of each role on a node that has no number of its own."""
        return {ProcessRole.WORKER: self.workers.nproc}

    def spares(self, nproc: int) -> int:
        """Return the number of processes that a node of `nproc` workers offers in addition."""
        return nproc if self.workers.spares is None else self.workers.spares

    @property
    def copies(self) -> float:
        """Return the share of tasks that may be copied before a late worker is suspended."""
        return self.stragglers.speculation_budget / 2

    def backup(self) -> BackupPolicy:
        """Return the number of workers whose results a step may drop."""
        dropped = self.stragglers.backup
        return BackupPolicy(workers=dropped, results_min=self.workers_at_start - dropped)

    def redundancy(self) -> Redundancy:
        """Return the protection by the nodes' memory. UserError if the text is none."""
        return read_redundancy(self.memory.redundancy)

    def pace(self) -> PacePolicy:
        """Return the bounds of the time between two saves."""
        return PacePolicy(*self.checkpoints.between_s)

    def lease(self) -> LeasePolicy:
        """Derive the lease's times: half a lease of silence is suspicious, a fifth is margin."""
        lease_s = self.nodes.lease_s
        return LeasePolicy(
            lease_s=lease_s,
            margin_s=lease_s / 5,
            suspect_s=lease_s / 2,
            abandon_s=self.nodes.abandon_s,
        )

    def slots(self, nproc: int) -> int:
        """Return the number of processes that a node offers to run, with `nproc` that work."""
        if not self.compat.enabled:
            return nproc
        return 1 + nproc + (nproc if self.compat.waiting is None else self.compat.waiting)

    def modules(self) -> tuple[str, ...]:
        """Return the modules that a script for torchrun wants imported before it has a rank."""
        return tuple(filter(None, (name.strip() for name in self.compat.preload.split(","))))

    def group_policy(self) -> GroupPolicy:
        """Return the part of the settings by which groups of processes are decided on."""
        return GroupPolicy(
            nodes_min=self.nodes.min,
            nodes_max=self.nodes_max,
            spares=self.compat.waiting,
            restarts_max=self.compat.restarts_max,
            steady_s=self.compat.steady_s,
            hang_s=self.workers.hang_s,
            lease=self.lease(),
        )

    def policy(self) -> CoordinatorPolicy:
        """Return the part of the settings that the coordinator decides by."""
        replicated = not self.workers.shard_optimizer
        suspended = self.stragglers.speculation_budget - self.copies
        return CoordinatorPolicy(
            virtual_ranks=self.virtual_ranks,
            nodes_min=self.nodes.min,
            nodes_max=self.nodes_max,
            workers_min=self.workers.min,
            lease=self.lease(),
            hang_s=self.workers.hang_s,
            spares=self.workers.spares,
            hot_spares=self.workers.hot_spares,
            keeps=bool(self.checkpoints.store),
            feeds=self.nodes.join_rate > 0 and replicated,
            speculation=suspended if replicated else 0.0,
            redundancy=self.redundancy(),
            procs=self.workers.procs,
            spread=self.workers.spread,
            servers=self.servers.count,
            replicated=replicated,
            restart=RestartPolicy(losses_max=self.workers.losses_max),
        )


SECTIONS: Mapping[str, type] = sections_of(JobSpec)
SETTINGS: Mapping[str, Setting] = {each.key: each for each in settings_of(JobSpec)}


def with_settings(spec: JobSpec, values: Mapping[str, object]) -> JobSpec:
    """Give settings other values, by their keys; every value must be of its setting's type."""
    changed: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        changed.setdefault(SETTINGS[key].section, {})[SETTINGS[key].name] = value
    sections = {
        name: dataclasses.replace(getattr(spec, name), **those) for name, those in changed.items()
    }
    return dataclasses.replace(spec, **sections)
