"""Plays failures on the real coordinator, agents and workers, in the simulator.

The cost of a failure is not assumed here: the shipped machines decide, and their time is measured.
Between two failures they run until all workers that are there train steadily again. The rest of the
quiet time is skipped, and counts as training at that speed: it would only repeat the same step. The
simulator's checkers look at every event.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from dataclasses import dataclass
from random import Random

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.types import AgentId
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.world import Machines, World
from holdfast.plan.failure_tables import Effect
from holdfast.plan.recovery import JOIN_STEPS, LEASES_TO_LOSS, RecoveryTimes, Standstill

#: Steps that the machines run before the next failure, once all workers are back.
STEADY_STEPS = 6
STEADY_MOST = 12
#: The same while workers are missing, as the duration of these steps is measured.
DEGRADED_STEPS = 30
#: Steps with all workers whose duration is measured at first.
MEASURED_STEPS = 100
#: Tasks of one size take the same time on all machines, but for this share.
TASK_SPREAD = 0.02
#: Events between two looks at the job.
EVENTS = 10
#: Steps that are played for each failure at most, besides the steps of its restart. The simulator
#: works out all states beforehand.
STEPS_OF_A_FAILURE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Describes a job to try, with one worker on each node. Times are seconds."""

    nodes: int
    spare_nodes: int = 0
    #: Tasks of each worker in a step.
    tasks: int = 1
    step_s: float = 5.0
    opening_s: float = 2.0
    start_s: float = 60.0
    load_s: float = 5.0
    lease_s: float = 5.0
    replace_s: float = 600.0
    #: Mean time between failures of the job.
    mtbf_s: float = 10_000.0
    #: Share of failures that end a process only; the rest take its node away.
    process_share: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Is the result of a trial, which covers `span_s` of the job's time."""

    nodes: int
    failures: int
    events: int
    span_s: float
    #: Time that was played event by event.
    played_s: float
    #: Mean duration of a step with all workers.
    step_s: float
    #: Share of the time that counts, at full speed.
    ettr: float


def run_trial(trial: Trial, failures: int, seed: int = 0) -> Found:
    """Run a job through failures. Violation if a checker finds a broken promise."""
    return _Run(trial, failures, seed).play()


class _Run:
    """Runs one world, and counts its steps and its time.

    The job's time is the time of the world and the quiet time that was skipped. Lost nodes come
    back by the job's time.
    """

    def __init__(self, trial: Trial, failures: int, seed: int) -> None:
        self._trial = trial
        self._failures = failures
        self._rng = Random(f"trial {seed}")
        self._world = World(make_options(trial, failures, seed), Machines(), None)
        self._events = 0
        self._newest = 0
        self._skipped_s = 0.0
        #: Training in the time that was skipped, at full speed.
        self._skipped_useful_s = 0.0
        #: Nodes that are away, by the job's time of their return.
        self._away: list[tuple[float, AgentId]] = []
        #: The view, and its step and time when it was first seen with all workers that are there.
        self._since: tuple[int, int, float] | None = None
        self._step_s = trial.step_s

    def play(self) -> Found:
        world, trial = self._world, self._trial
        world.begin()
        while not self._is_steady(MEASURED_STEPS):
            self._advance(math.inf)
        self._step_s = self._current_step_s()
        began, steps = self._now, self._steps
        failure = began
        for _ in range(self._failures):
            failure += self._rng.expovariate(1 / trial.mtbf_s)
            self._run_to(failure)
            self._strike()
        while self._away or not self._is_steady(STEADY_MOST):
            self._run_to(self._away[0][0] if self._away else self._now + trial.step_s)
        span_s = self._now - began
        useful_s = (self._steps - steps) * self._step_s + self._skipped_useful_s
        return Found(
            nodes=trial.nodes,
            failures=self._failures,
            events=self._events,
            span_s=span_s,
            played_s=span_s - self._skipped_s,
            step_s=self._step_s,
            ettr=min(useful_s / span_s, 1.0),
        )

    @property
    def _now(self) -> float:
        """Return the job's time."""
        return self._world.now + self._skipped_s

    @property
    def _steps(self) -> int:
        """Return the number of steps that the job has completed."""
        steps = [process.work.step for process in self._world.live_processes()]
        self._newest = max(steps, default=self._newest)
        return self._newest

    def _run_to(self, end: float) -> None:
        """Play until a time of the job; skip the rest of it when only steps are left."""
        steady = self._rng.randint(STEADY_STEPS, STEADY_MOST)
        while self._now < end:
            until = min(end, self._away[0][0]) if self._away else end
            if self._is_steady(steady if self._is_whole() else DEGRADED_STEPS):
                self._skip(until - self._now)
            else:
                self._advance(until - self._skipped_s)
            while self._away and self._away[0][0] <= self._now:
                _, name = heapq.heappop(self._away)
                self._world.faults.note("node is back")
                self._world.hosts[name].start()
                self._since = None

    def _skip(self, span_s: float) -> None:
        self._skipped_s += span_s
        speed = 1.0 if self._is_whole() else self._step_s / self._current_step_s()
        self._skipped_useful_s += span_s * speed

    def _count_possible(self) -> int:
        """Return the number of workers that may train on the nodes that are there."""
        up = sum(host.machine is not None for host in self._world.hosts.values())
        return min(up, self._trial.nodes)

    def _is_whole(self) -> bool:
        """Return whether no worker is missing."""
        return self._count_possible() == self._trial.nodes

    def _current_step_s(self) -> float:
        """Return the mean duration of the steps since the job became steady."""
        assert self._since is not None
        _, step, at = self._since
        return (self._world.now - at) / (self._steps - step)

    def _is_steady(self, steps: int) -> bool:
        """Return whether all workers that are there have trained together for this many steps."""
        disk = self._world.truth.membership.disk
        view = disk.view if disk is not None else None
        if view is None or len(view.members) < self._count_possible():
            self._since = None
        elif self._since is None or self._since[0] != view.number:
            self._since = (view.number, self._steps, self._world.now)
        return self._since is not None and self._steps - self._since[1] >= steps

    def _advance(self, deadline: float) -> None:
        """Play a few events before a time of the world."""
        if self._world.coordinator.outcome is not None:
            raise InvariantError(f"the job has ended: {self._world.coordinator.outcome!r}")
        for _ in range(EVENTS):
            if not self._world.timeline.step(deadline):
                self._world.timeline.now = deadline
                return
            self._events += 1

    def _strike(self) -> None:
        world, rng, trial = self._world, self._rng, self._trial
        live = world.live_processes()
        if not live:
            return
        world.faults.note("failure")
        self._since = None
        process = rng.choice(live)
        if rng.random() < trial.process_share:
            process.end(-9, "killed")
            return
        world.hosts[process.agent].crash()
        heapq.heappush(self._away, (self._now + trial.replace_s, process.agent))


def make_options(trial: Trial, failures: int, seed: int) -> Options:
    """Return the simulator's options for a trial: no faults of its own, and steps without end."""
    tasks = trial.tasks
    restart_s = trial.start_s + trial.load_s + trial.opening_s + trial.lease_s
    each = STEPS_OF_A_FAILURE + math.ceil(4 * restart_s / trial.step_s)
    return Options(
        seed=seed,
        agents=trial.nodes + trial.spare_nodes,
        agents_late=0,
        slots=1,
        vranks=tasks * trial.nodes,
        loops=((failures + 1) * each,),
        nodes_min=1,
        nodes_max=trial.nodes,
        workers_min=1,
        task_s=trial.step_s / tasks,
        task_spread=TASK_SPREAD,
        long_share=0.0,
        optimizer_s=0.0,
        boot_s=trial.start_s,
        load_s=trial.load_s,
        build_s=trial.opening_s / 0.6,  # a group takes 0.2 to 1.0 of it
        build_timeout_s=max(10 * trial.opening_s, 60.0),
        link_s=max(60.0, 4 * trial.lease_s),
        control_s=0.002,
        channel_s=0.0002,
        data_s=0.0005,
        heartbeat_s=trial.lease_s / 4,
        lease_s=trial.lease_s,
        lease_margin_s=trial.lease_s / 5,
        suspect_s=trial.lease_s / 2,
        abandon_s=300.0,
        late_s=0.05,
        settle_s=120.0,
        hang_s=max(300.0, 20 * trial.step_s),
        loss=0.0,
        duplicate=0.0,
        drift=0.0,
        cut_in_flight=0.0,
        unheard_break=0.0,
        faults=(),
        crash_inside=0.0,
        fault_every_s=math.inf,
        faults_end_s=0.0,
        feeds=True,
        balance=BalancePolicy(warm_up=0, window=2),
    )


def assume_recovery(trial: Trial, found: Found) -> RecoveryTimes:
    """Return the numbers that the closed form assumes for a trial.

    The duration of a step and the rate of failures are as they were found: few failures come by
    chance more often or more seldom than on average.
    """
    step_s, rate = found.step_s, found.failures / found.span_s
    rates = {
        Effect.NODE: (1 - trial.process_share) * rate,
        Effect.PROCESS: trial.process_share * rate,
    }
    virtual = trial.tasks * trial.nodes
    ready_s = trial.start_s + trial.load_s + JOIN_STEPS * step_s
    pause = Standstill(opening_s=trial.opening_s, again_s=step_s / 2)
    found_s = LEASES_TO_LOSS * trial.lease_s
    return RecoveryTimes(
        workers=trial.nodes,
        rates=rates,
        lost=dict.fromkeys(rates, 1),
        pauses={
            Effect.NODE: dataclasses.replace(pause, detection_s=found_s),
            Effect.PROCESS: pause,
        },
        back_s={Effect.NODE: trial.replace_s + ready_s, Effect.PROCESS: ready_s},
        spare_back_s=ready_s,
        spares=trial.spare_nodes,
        join=Standstill(opening_s=trial.opening_s),
        speed=lambda n: trial.tasks / -(-virtual // n) if n > 0 else 0.0,
    )
