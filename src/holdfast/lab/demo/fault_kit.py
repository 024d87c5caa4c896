"""Describes faults as data, strikes them at a running job, and measures the cost of each.

Everything follows the outside of the job (its status, its events, its committed steps), never a
timer. The workers to strike depend only on the order given in each fault, as long as those workers
live.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.records.incidents import list_incidents
from holdfast.engine.runtime.local_run import ACTIVE, LocalRun, strike

JOINING = ("spare", "joining")  # started, asking for work or receiving the job's state
USUAL_STEPS = 12  # before a fault; their median is the usual step
SETTLED_STEPS = 3  # after a fault, before its step counts as recovered
REST_S = 6.0  # a rest may end after so long, however few steps a slow machine has done


class FaultKind(enum.Enum):
    """Names the fault that strikes a worker."""

    KILL = "kill"
    FREEZE = "freeze"
    KILL_JOINING = "kill while it joins"

    @property
    def signal(self) -> signal.Signals:
        return signal.SIGSTOP if self is FaultKind.FREEZE else signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """Strikes `count` workers at once, the first live ones of `order`.

    `rest_steps`: steps without a fault that come before it.
    """

    kind: FaultKind
    order: tuple[int, ...]
    rest_steps: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind.value}{f' {self.count} at once' * (self.count > 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Records a fault that has happened, at `time` (seconds since the epoch)."""

    fault: PlannedFault
    victims: tuple[int, ...]
    #: Steps committed when the fault struck.
    step: int
    time: float

    def __str__(self) -> str:
        names = " and ".join(map(str, self.victims))
        workers = "worker" if len(self.victims) == 1 else "workers"
        match self.fault.kind:
            case FaultKind.FREEZE:
                return f"froze {workers} {names} (SIGSTOP)"
            case FaultKind.KILL_JOINING:
                return f"killed {workers} {names} (SIGKILL) while joining"
        return f"killed {workers} {names} (SIGKILL){' at once' * (len(self.victims) > 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Records a step as the job's leader saw it end, at `time` (seconds since the epoch)."""

    step: int
    loss: float
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Describes what a strike led to.

    `next_step_s`: from the strike to the end of the step that had to recover.
    """

    strike: Strike
    #: The causes that the job itself has found.
    causes: tuple[str, ...]
    next_step_s: float
    usual_step_s: float
    #: Time from the last step before the fault to the first one after it, less a usual step.
    stall_s: float
    #: The pause of its incident, as `holdfast explain` prints it; None if no worker had to stop.
    pause_s: float | None


def schedule(rest_steps: int, workers: int, seed: int) -> tuple[PlannedFault, ...]:
    """Plan one fault of each kind, and two workers killed at once, for 2 workers or more."""
    dice = random.Random(seed)

    def fault(kind: FaultKind, rest_steps: int = rest_steps, count: int = 1) -> PlannedFault:
        order = tuple(dice.sample(range(workers), workers))
        return PlannedFault(kind=kind, order=order, rest_steps=rest_steps, count=count)

    return (
        fault(FaultKind.KILL),
        fault(FaultKind.KILL_JOINING, rest_steps=0),  # workers that join are soon members
        fault(FaultKind.FREEZE),
        fault(FaultKind.KILL, count=min(2, workers - 1)),
    )


class Striker:
    """Strikes the faults of a schedule at one run, one at a time; `poll` it often.

    `step` in its methods: steps committed so far. `now`: seconds of a clock that never goes back.
    """

    def __init__(self, run: LocalRun, faults: Sequence[PlannedFault]) -> None:
        self.pending = list(faults)
        self.strikes: list[Strike] = []
        self._run = run
        self._rest_began: tuple[int, float] | None = None  # step and time

    def measure_rest(self, step: int, now: float) -> float:
        """Return the steps since the job recovered from the last fault, or -1 before that.

        It is infinite once the rest is long enough for a slow machine.
        """
        if self._rest_began is None and step > 0 and self._has_recovered(step):
            self._rest_began = (step, now)
        if self._rest_began is None:
            return -1
        steps, seconds = step - self._rest_began[0], now - self._rest_began[1]
        return math.inf if steps >= SETTLED_STEPS and seconds >= REST_S else steps

    def find_due(self, step: int, now: float) -> list[PlannedFault]:
        """Return the faults that `poll` tries in this order, until one finds its victims."""
        rest = self.measure_rest(step, now)
        return [fault for fault in self.pending if rest >= fault.rest_steps]

    def poll(self, step: int, now: float) -> Strike | None:
        """Strike a fault that is due, if there are enough workers for it."""
        due = self.find_due(step, now)
        if not due:
            return None
        with contextlib.suppress(HoldfastError):
            workers = self._run.status()["workers"]
            for fault in due:
                victims = _victims(fault, workers)
                if not victims:
                    continue
                done = Strike(fault=fault, victims=tuple(victims), step=step, time=time.time())
                for pid in victims.values():
                    strike(pid, fault.kind.signal)
                self.pending.remove(fault)
                self.strikes.append(done)
                self._rest_began = None
                return done
        return None

    def _has_recovered(self, step: int) -> bool:
        """Return whether the last strike's victims are known as lost and the job has resumed."""
        if not self.strikes:
            return True
        last = self.strikes[-1]
        lost = _losses(last, self._run.events("lost"))
        return len(lost) == len(last.victims) and step >= last.step + SETTLED_STEPS


def recovery(done: Strike, events: list[dict[str, Any]], commits: list[StepEnd]) -> Recovery | None:
    """Measure what a strike cost; None if the job ended before it had to recover.

    The step that recovered is the slower of the two that ended first after the loss was known: the
    one under way may have got all it needed from the victims before they were struck.
    """
    lost = _losses(done, events)
    if len(lost) < len(done.victims):
        return None
    known = max(event["time"] for event in lost)
    before = [c for c in commits if c.time <= done.time][-USUAL_STEPS - 1 :]
    usual = _median_step_s(before)
    found: list[tuple[float, float]] = []
    for last, commit in itertools.pairwise(commits):
        if commit.time > known:
            gap = commit.time - last.time - usual * (commit.step - last.step)
            found.append((gap, commit.time - done.time))
    if not found:
        return None
    stall, after = max(found[:2])
    # "worker 2 was lost: ended by SIGKILL"; two victims often share one cause.
    causes = tuple(dict.fromkeys(event["text"].partition(": ")[2] for event in lost))
    return Recovery(
        strike=done,
        causes=causes,
        next_step_s=after,
        usual_step_s=usual,
        stall_s=stall,
        pause_s=_find_pause_s(lost[0], events),
    )


def _find_pause_s(loss: dict[str, Any], events: list[dict[str, Any]]) -> float | None:
    """Return the pause of the incident that a loss belongs to."""
    for incident in list_incidents(events):
        if loss in incident.events:
            return incident.cost.get("pause_s")
    return None


def _median_step_s(commits: list[StepEnd]) -> float:
    gaps = [(b.time - a.time) / (b.step - a.step) for a, b in itertools.pairwise(commits)]
    return statistics.median(gaps) if gaps else 0.0


def _victims(fault: PlannedFault, workers: list[dict[str, Any]]) -> dict[int, int]:
    """Return worker -> pid; empty if there are not enough, or no worker would survive."""
    states = JOINING if fault.kind is FaultKind.KILL_JOINING else ACTIVE
    there = {w["id"]: w["pid"] for w in workers if w["state"] in states}
    active = [w["id"] for w in workers if w["state"] in ACTIVE]
    chosen = [worker for worker in fault.order if worker in there][: fault.count]
    enough = len(chosen) == fault.count and any(w not in chosen for w in active)
    return {worker: there[worker] for worker in chosen} if enough else {}


def _losses(done: Strike, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Find the first loss of each victim since the strike."""
    first: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == "lost" and event["time"] >= done.time:
            first.setdefault(event["worker"], event)
    return [first[worker] for worker in done.victims if worker in first]
