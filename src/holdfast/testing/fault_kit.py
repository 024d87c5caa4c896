"""Describes faults as data, strikes them at a running job, and measures what each one cost.

Everything is driven by what the job shows from outside (its status, its events, the steps that it
has committed), never by a timer. Which workers are struck depends only on the order given in each
fault, as long as those workers live.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.testing.local_run import ACTIVE, LocalRun, strike

JOINING = ("spare", "joining")  # started, asking for work or receiving the job's state
USUAL_STEPS = 12  # before a fault; their median is the usual step
SETTLED_STEPS = 3  # after a fault, before the next one is struck


class FaultKind(enum.Enum):
    """Says what is done to a worker."""

    KILL = "kill"
    FREEZE = "freeze"
    KILL_JOINING = "kill while it joins"

    @property
    def signal(self) -> signal.Signals:
        return signal.SIGSTOP if self is FaultKind.FREEZE else signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """Strikes `count` workers at once, the first live ones of `order`, after `step` steps."""

    step: int
    kind: FaultKind
    order: tuple[int, ...]
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Records a fault that has happened, at `time` (seconds since the epoch)."""

    fault: PlannedFault
    victims: tuple[int, ...]
    step: int  # steps committed when it happened
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
    causes: tuple[str, ...]  # as the job itself understood them
    next_step_s: float
    usual_step_s: float
    stall_s: float  # the recovering step's gap to the one before it, less a usual step


def schedule(steps: int, workers: int, seed: int) -> tuple[PlannedFault, ...]:
    """Plan one fault of each kind, and two workers at once, over `steps`, for 2 workers or more."""
    dice = random.Random(seed)

    def fault(part: float, kind: FaultKind, count: int = 1) -> PlannedFault:
        order = tuple(dice.sample(range(workers), workers))
        return PlannedFault(step=max(1, int(steps * part)), kind=kind, order=order, count=count)

    return (
        fault(0.1, FaultKind.KILL),
        fault(0.1, FaultKind.KILL_JOINING),  # whoever replaces the first
        fault(0.4, FaultKind.FREEZE),
        fault(0.65, FaultKind.KILL, count=min(2, workers - 1)),
    )


class Striker:
    """Strikes the faults of a schedule at one run, one at a time; `poll` it often."""

    def __init__(self, run: LocalRun, faults: Sequence[PlannedFault]) -> None:
        self.pending = list(faults)
        self.strikes: list[Strike] = []
        self._run = run

    def due(self, step: int) -> bool:
        """Tell whether `poll` would strike if it found enough workers."""
        return self._settled(step) and any(fault.step <= step for fault in self.pending)

    def poll(self, step: int) -> Strike | None:
        """Strike the first due fault that finds its victims. `step`: steps committed so far."""
        if not self.due(step):
            return None
        with contextlib.suppress(HoldfastError):
            workers = self._run.status()["workers"]
            for fault in self.pending:
                victims = _victims(fault, workers) if fault.step <= step else {}
                if not victims:
                    continue
                done = Strike(fault=fault, victims=tuple(victims), step=step, time=time.time())
                for pid in victims.values():
                    strike(pid, fault.kind.signal)
                self.pending.remove(fault)
                self.strikes.append(done)
                return done
        return None

    def _settled(self, step: int) -> bool:
        """Tell whether the last strike's victims are known to be lost and the job has gone on."""
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
        strike=done, causes=causes, next_step_s=after, usual_step_s=usual, stall_s=stall
    )


def _median_step_s(commits: list[StepEnd]) -> float:
    gaps = [(b.time - a.time) / (b.step - a.step) for a, b in itertools.pairwise(commits)]
    return statistics.median(gaps) if gaps else 0.0


def _victims(fault: PlannedFault, workers: list[dict[str, Any]]) -> dict[int, int]:
    """Return worker -> pid; empty if there are not enough, or nobody would survive."""
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
