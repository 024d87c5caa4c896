"""Lists the parameters of a simulated run: sizes, speeds and fault kinds."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.ground.events import StepKind
from holdfast.engine.core.membership.agent import AgentPolicy
from holdfast.engine.core.policies import (
    BackupPolicy,
    CoordinatorPolicy,
    LeasePolicy,
    ReplicationPolicy,
    RestartPolicy,
)
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.step_policy import StepPolicy

FAULT_KINDS = (
    "worker_crash",
    "worker_crash_inside",
    "freeze",
    "silent",
    "busy",
    "stuck",
    "slow",
    "agent_crash",
    "agent_lost",
    "agent_freeze",
    "node_freeze",
    "drain",
    "coordinator_crash",
    "coordinator_crash_inside",
    "journal_lost",
    "partition",
    "lossy",
    "link_break",
    "data_partition",
)
RACK_KINDS = ("rack_crash", "rack_partition")  # several nodes at the same moment
CLOCK_KIND = "clock_set"  # the clock of a node, by hours
LATER_KINDS = (*RACK_KINDS, "coordinator_freeze", "rot")
EXCHANGE_KIND = "exchange_inside"  # processes die, freeze or are cut off between two turns
WRONG_KINDS = ("flip", "liar", "lie_once")
SAVE_KINDS = ("writer_crash", "store_silent")
STORE_LOST = "store_lost"  # for good, so the job may have to end: never drawn
USUAL_MAX = 1.5  # delays of the simulated world are up to this multiple of the typical one,
LONG = 10  # and a few are longer by this factor
DELAY_MAX = USUAL_MAX * LONG
RACK_SHARE = 250  # nodes in one rack of a large job


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Describes a run. Durations: simulated seconds; `loops`: the step at which each loop ends."""

    seed: int
    agents: int
    agents_late: int
    slots: int
    vranks: int
    loops: tuple[int, ...]
    nodes_min: int
    nodes_max: int
    workers_min: int
    task_s: float
    optimizer_s: float
    boot_s: float
    load_s: float
    build_s: float
    build_timeout_s: float
    #: After this silence of the network the kernel gives a connection up.
    link_s: float
    control_s: float
    channel_s: float
    data_s: float
    heartbeat_s: float
    lease_s: float
    lease_margin_s: float
    suspect_s: float
    abandon_s: float
    #: Timers of agents are late by up to this time.
    late_s: float
    settle_s: float
    hang_s: float
    loss: float
    duplicate: float
    #: Clocks run fast or slow by up to this fraction.
    drift: float
    #: Chance that a closed connection loses messages under way.
    cut_in_flight: float
    #: Chance that a peer never notices a closed connection.
    unheard_break: float
    faults: tuple[str, ...]
    #: Chance of a crash before each single effect.
    crash_inside: float
    fault_every_s: float
    faults_end_s: float
    #: Steps from one checkpoint to the next; 0: there are none.
    save_every: int = 0
    #: The store keeps at least this number of checkpoints; 0: all of them.
    keep_last: int = 0
    balance: BalancePolicy | None = None
    patience: Patience = Patience()  # noqa: RUF009 - it never changes
    speculation: float = 0.0
    #: Share of tasks that are computed twice.
    audit: float = 0.0
    #: All of the state is compared in this number of steps; 0: it never is.
    cycle: int = 0
    backup: BackupPolicy = BackupPolicy()  # noqa: RUF009 - it never changes
    #: Time at which the operator ends the job; 0: never.
    stop_s: float = 0.0
    #: Time at which the operator ends it again, and for good; 0: never.
    stop_again_s: float = 0.0
    #: This number of workers may be lost with no step committed in between.
    losses_max: int = 10_000
    #: Step in which every script fails; -1: no script does.
    fails_in: int = -1
    #: Each script fails by an error of its own machine.
    fails_by_machine: bool = False
    #: Step before which worker 0 leaves its loop alone; -1: it never does.
    parts_at: int = -1
    #: A wrong worker computes wrongly again after a restart.
    wrong_stays: bool = False
    #: On a sound machine a task has the same bits each time.
    exact_bits: bool = False
    #: Several workers are wrong at once, as long as most are sound.
    wrong_together: bool = False
    #: Terms, views and incarnations of agents are numbered from here.
    counts_from: int = 0
    #: Steps from one boundary to the next.
    rounds: int = 1
    #: Whether steps that follow no boundary exchange values only.
    tells_values: bool = False
    #: The script keeps something that workers which join lack.
    forgetful: bool = False
    #: Workers that join receive the state while the members train.
    feeds: bool = False
    #: Chance that a member has no memory for a copy of its state.
    feed_fails: float = 0.0
    #: Slots on each node for workers that are held back.
    spares: int = 0
    #: Whether spares are members of views.
    hot_spares: bool = False
    #: A task takes `task_s`, more or less by up to this share.
    task_spread: float = 0.5
    #: This share of all delays is many times as long as usual.
    long_share: float = 0.02
    #: Data and parity pieces in the nodes' memory; 0: there are none.
    pieces: tuple[int, int] = (0, 0)
    #: Steps from one state in the nodes' memory to the next.
    protect_every: int = 0
    #: Silence of a store that is borne while the job begins.
    restore_s: float = 300.0
    #: Processes of each worker.
    procs: int = 1
    #: Nodes over which a worker's processes lie.
    spread: int = 1
    #: Mean delay of the events of further shards.
    shard_lag_s: float = 0.0
    #: Processes that hold rows of tables.
    servers: int = 0
    #: Each worker holds its share of the state only.
    shard_optimizer: bool = False
    #: Chance that a message between workers arrives twice, the second time late.
    repeats: float = 0.0
    #: Failure domains of nodes; 0: no domain is known.
    racks: int = 0
    #: Age at which an earlier job lost its machine at this address; 0: there was no such job.
    left_behind_s: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Return whether no wrong value is ever used."""
        return self.audit == 1.0 or not {*WRONG_KINDS, "sum_wrongly"} & set(self.faults)

    @property
    def redundancy(self) -> Redundancy:
        return Redundancy(data=self.pieces[0], parity=self.pieces[1])

    def step_policy(self) -> StepPolicy:
        """Return the settings of the workers' machines."""
        saves = self.save_every > 0
        return StepPolicy(
            seed=self.seed,
            audit=self.audit,
            cycle=self.cycle,
            script_cycle=self.cycle,
            keeps=saves,
            balance=None if self.backup.workers else self.balance,
            backup=self.backup,
            patience=self.patience,
            saves=SavePolicy(enabled=saves, every=self.save_every, compared=self.cycle > 0),
            restore_s=self.restore_s,
            replication=ReplicationPolicy(
                redundancy=self.redundancy,
                every=self.protect_every,
                is_sharded=self.shard_optimizer,
            ),
        )

    def lease_policy(self) -> LeasePolicy:
        """Return the leases of agents."""
        return LeasePolicy(
            lease_s=self.lease_s,
            margin_s=self.lease_margin_s,
            suspect_s=self.suspect_s,
            abandon_s=self.abandon_s,
        )

    def agent_policy(self) -> AgentPolicy:
        """Return the settings of the agents' machines."""
        return AgentPolicy(
            heartbeat_s=self.heartbeat_s, lease=self.lease_policy(), spares=self.spares
        )

    def coordinator_policy(self) -> CoordinatorPolicy:
        """Return the settings of the coordinator's machine."""
        return CoordinatorPolicy(
            virtual_ranks=self.vranks,
            nodes_min=self.nodes_min,
            nodes_max=self.nodes_max,
            workers_min=self.workers_min,
            lease=self.lease_policy(),
            settle_s=self.settle_s,
            patience_s=2.0,
            grace_s=self.grace_s,
            hang_s=self.hang_s,
            speculation=self.speculation,
            retreats_max=1000,
            keeps=self.save_every > 0,
            spares=self.spares,
            hot_spares=self.hot_spares,
            feeds=self.feeds,
            redundancy=self.redundancy,
            procs=self.procs,
            spread=self.spread,
            servers=self.servers,
            replicated=not self.shard_optimizer,
            restart=RestartPolicy(
                losses_max=self.losses_max,
                backoff_s=0.1,
                backoff_max_s=2.0,
                quarantine_s=1.0,
                wrong_s=1.0,
                wrong_max_s=8.0,
                quarantine_max_s=8.0,
                probation_s=5.0,
            ),
        )

    @property
    def steps(self) -> int:
        return self.loops[-1]

    def find_domains(self, node: str) -> Domains:
        """Return the labels of a node: each zone has two racks, which are no neighbours by name."""
        if not self.racks:
            return ()
        rack = zlib.crc32(node.encode()) % self.racks
        return (f"rack=r{rack}", f"zone=z{rack // 2}")

    def rests_before(self, step: int) -> bool:
        """Return whether there is a boundary before this step."""
        return step % self.rounds == 0 or step in self.loops

    def next_rest(self, step: int) -> int:
        """Return the step before which the first boundary after this step lies."""
        return next(each for each in itertools.count(step + 1) if self.rests_before(each))

    def kind_of(self, step: int) -> StepKind:
        values = self.tells_values and not self.rests_before(step)
        return StepKind.VALUES if values else StepKind.GRADIENTS

    @property
    def recovery_s(self) -> float:
        """Return the longest time until an undisturbed job commits a step."""
        start_s = 2 * self.boot_s + 10 * self.load_s + self.build_timeout_s
        silence_s = 2 * (self.lease_s + self.lease_margin_s) + self.link_s
        only_processes_die = {"quit", "worker_crash", "worker_crash_inside", "link_break"}
        only_processes_die.add(CLOCK_KIND)  # no process waits for a clock
        if not only_processes_die.issuperset(self.faults):
            silence_s += self.abandon_s + self.hang_s
        back_off_s = 10.0
        return self.joining_s + start_s + silence_s + back_off_s

    @property
    def joining_s(self) -> float:
        """Return in what time a worker that is ready joins a job with room, at most."""
        step_s = 3 * self.vranks * self.task_s + 2 * self.optimizer_s
        messages_s = (
            40 * (self.data_s + self.procs * self.shard_lag_s)
            + 20 * self.control_s
            + 10 * self.channel_s
        )
        return step_s + messages_s + self.settle_s

    @property
    def feeding_s(self) -> float:
        """Return in what time a worker is fed that could join, at most; 0 if none is."""
        step_s = 3 * self.vranks * self.task_s + 2 * self.optimizer_s + 40 * self.data_s
        return (self.cycle + 4 * self.rounds + 4) * step_s * self.feeds

    def saving_s(self, longest: float) -> float:
        """Return the longest time that a sound job which is stopped takes for its last checkpoint.

        `longest`: how many times its typical length a delay may take. A view may just have begun,
        so that its members obtain the state first. The stop may come just after the votes of a
        step: then the next step agrees on the checkpoint, which is copied at the end of its turn.
        An audit may find a wrong task in each step, so that it is computed again, and the sums are
        tried. Once a share may be too late for the rest: then the checkpoint is made again a turn
        later.
        """
        exchange_s = longest * self.data_s + 10 * (self.procs - 1) * self.shard_lag_s
        load_s = longest * self.load_s
        orders_s = longest * (self.control_s + self.channel_s) + 2 * self.heartbeat_s
        state_s = self.build_s + 2 * load_s + 4 * exchange_s
        tasks_s = 1.5 * 2 * self.vranks * self.task_s
        step_s = 2 * (tasks_s + 4 * exchange_s) + 6 * exchange_s + 1.5 * self.optimizer_s
        save_s = 2 * load_s / 4 + load_s + 1.0
        return orders_s + state_s + 3 * self.rounds * step_s + 2 * save_s

    @property
    def grace_s(self) -> float:
        """Return for how long a job that is stopped waits for its last checkpoint."""
        return self.saving_s(DELAY_MAX)

    @property
    def finish_by_s(self) -> float:
        """Return when a run whose faults have ended must be over: every wait it may meet, twice."""
        lag_s = (self.vranks + 40) * self.procs * self.shard_lag_s
        each_s = self.vranks * self.task_s * 4 + self.optimizer_s + 40 * self.data_s + lag_s
        work_s = self.steps * each_s
        waits_s = self.lease_s + self.lease_margin_s + self.settle_s + self.hang_s + self.abandon_s
        if STORE_LOST in self.faults:
            waits_s += self.restore_s
        waits_s = 60 + 4 * waits_s + 4 * self.build_timeout_s
        if self.stop_s:
            waits_s += self.grace_s
        return self.faults_end_s + waits_s + 2 * work_s
