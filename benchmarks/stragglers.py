"""Slow workers: how surely and soon they are found, and the gain from giving them less to do."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speeds import Speeds
from holdfast.engine.core.step.stragglers import Detector, Kind
from holdfast.engine.core.types import AgentId, Incarnation, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.exchange.layout import Layout

NOISE, ODD, COMMON = 0.03, 0.01, 0.1  # shares of a task; share of steps 1.3 to 3 times as long
BEGIN, WITHIN = 60, 20  # steps: when slowness begins, and the limit for finding it
FACTORS = (1.2, 1.35, 1.5, 2.0, 3.0, 5.0, 10.0)
PATTERNS: dict[str, Callable[[int, random.Random], float]] = {
    "constant": lambda step, dice: 1.0,
    "four steps on, four off": lambda step, dice: float(step // 4 % 2 == 0),
    "in 60 % of the steps": lambda step, dice: float(dice.random() < 0.6),
    "growing over ten steps": lambda step, dice: min((step + 1) / 10, 1.0),
}
SLOW = (Kind.STEADY, Kind.INTERMITTENT, Kind.PERIODIC, Kind.DRIFTING, Kind.OWN_PAST)
RUN_S = 600.0


@dataclass(slots=True)
class Detection:
    cases: int = 0
    latencies: list[int] = field(default_factory=list)  # steps until found, of those within 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    workers: int
    worker_steps: int
    false: int
    observe_us: float  # a step


def made_up(
    workers: int, steps: int, dice: random.Random, slow: Callable[[int, int], float]
) -> list[list[float]]:
    """Return the task times of each step; `slow(worker, step)` is the injected factor."""
    rows = []
    for step in range(steps):
        length = math.exp(dice.gauss(0, COMMON))
        row = []
        for worker in range(workers):
            odd = dice.uniform(1.3, 3.0) if dice.random() < ODD else 1.0
            row.append(0.1 * length * odd * math.exp(dice.gauss(0, NOISE)) * slow(worker, step))
        rows.append(row)
    return rows


def detect(pattern: str, workers: int, seeds: int) -> Detection:
    """Make one worker slow: all factors, each with `seeds` seeds."""
    found, when = Detection(), PATTERNS[pattern]
    for factor, seed in itertools.product(FACTORS, range(seeds)):
        dice = random.Random(f"{pattern} {workers} {factor} {seed}")
        victim = dice.randrange(workers)

        def slow(worker: int, step: int) -> float:
            late = worker == victim and step >= BEGIN  # noqa: B023 - used in this round only
            return 1 + (factor - 1) * when(step - BEGIN, dice) if late else 1.0  # noqa: B023

        detector = Detector([WorkerId(i) for i in range(workers)])
        found.cases += 1
        for step, row in enumerate(made_up(workers, BEGIN + WITHIN, dice, slow)):
            hits = [v for v in detector.observe(row) if v.worker == victim and v.kind in SLOW]
            if hits and step >= BEGIN:
                found.latencies.append(step - BEGIN + 1)
                break
    return found


def false_alarms(workers: int, worker_steps: int) -> Alarms:
    steps = worker_steps // workers
    rows = made_up(workers, steps, random.Random(workers), lambda worker, step: 1.0)
    detector = Detector([WorkerId(i) for i in range(workers)])
    began = time.perf_counter()
    verdicts = [v for row in rows for v in detector.observe(row)]
    spent = time.perf_counter() - began
    false = sum(v.kind in SLOW for v in verdicts)
    return Alarms(
        workers=workers,
        worker_steps=steps * workers,
        false=false,
        observe_us=spent / steps * 1e6,
    )


@dataclass(slots=True)
class Real:
    """Jobs of four real workers. `others`: verdicts on workers that were not slowed down."""

    jobs: int = 0
    latencies: list[int] = field(default_factory=list)  # steps until found
    others: int = 0
    worker_steps: int = 0


def detect_real(what: str, factors: Sequence[float], begin: int = 40, task_s: float = 0.05) -> Real:
    """Make one of four workers slow; `what` follows the factor in the fault script."""
    found, steps = Real(), begin + 2 * WITHIN
    for factor in factors:
        faults = f"worker 2 from step {begin} slow {factor} {what}"
        x = run_job(4, task_s, steps, ("--no-rebalance",), faults)
        since, hits = x.ended[begin - 1], [t for t, text in x.slow if text.startswith("worker 2 ")]
        late = [sum(since < end <= t for end in x.ended) for t in hits if t > since]
        found.latencies += late[:1]
        found.others += len(x.slow) - sum(t > since for t in hits)
        found.jobs += 1
        found.worker_steps += 4 * steps
    return found


def change_ms(workers: int, vranks: int) -> float:
    """Return the time of a change of the assignment, from votes to new layout: median of 5."""
    names = [WorkerId(i) for i in range(workers)]
    view = View(
        number=ViewNumber(1),
        members=tuple(
            Member(worker=w, incarnation=Incarnation(1), agent=AgentId("a")) for w in names
        ),
        owners=tuple(names[v * workers // vranks] for v in range(vranks)),
        resume_step=0,
        leader=names[0],
    )
    times = []
    for _ in range(5):
        speeds = Speeds(view, BalancePolicy())
        while speeds.owners == view.owners:
            took = [1000 * vranks // workers] * workers
            took[1] *= 2
            began = time.perf_counter()
            speeds.observe(took, leads=False)
        Layout.of(view, Peer(names[0]), speeds.owners)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


@dataclass(slots=True)
class Balance:
    """Median step times, once the assignment has settled, run by run in pairs."""

    still_s: list[float] = field(default_factory=list)
    moving_s: list[float] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)


def rebalance(vranks: int, task_s: float, pairs: int, steps: int = 40) -> Balance:
    """Measure four workers, one of them twice as slow in everything."""
    found = Balance()
    for _ in range(pairs):
        for flags, times in (((), found.moving_s), (("--no-rebalance",), found.still_s)):
            x = run_job(vranks, task_s, steps, flags, "worker 2 always slow 2")
            times.append(statistics.median(x.step_s[steps // 2 :]))
            found.digests.add(x.digest)
    return found


@dataclass(slots=True)
class Speculation:
    """Step times of all runs; and how often a worker was suspended."""

    waiting_s: list[float] = field(default_factory=list)
    going_on_s: list[float] = field(default_factory=list)
    suspended: int = 0
    tasks: int = 0  # tasks of all those runs, counted once
    digests: set[str] = field(default_factory=set)


def speculate(pairs: int, steps: int = 300, every: int = 25, task_s: float = 0.05) -> Speculation:
    """Stop one of four workers now and then, for half a second to three seconds."""
    found = Speculation()
    for pair in range(pairs):
        dice = random.Random(pair)
        stalls = [
            f"worker 2 step {step} stall {dice.uniform(0.5, 3.0):.2f}"
            for step in range(every, steps, every)
        ]
        x = run_job(4, task_s, steps, (), "\n".join(stalls))
        found.going_on_s += x.step_s
        found.suspended += x.suspended
        found.tasks += 4 * steps
        y = run_job(4, task_s, steps, ("--speculation-budget", "0"), "\n".join(stalls))
        found.waiting_s += y.step_s
        found.digests |= {x.digest, y.digest}
    return found


@dataclass(slots=True)
class Backup:
    """Step times of all runs, and the shares of the samples that were dropped."""

    waiting_s: list[float] = field(default_factory=list)
    dropping_s: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def backup(pairs: int, steps: int = 300, task_s: float = 0.05) -> Backup:
    """Stop four of five workers now and then; never the leader, whose clock counts."""
    found = Backup()
    for pair in range(pairs):
        dice = random.Random(pair)
        stalls = [
            f"worker {worker} step {step} stall {dice.uniform(0.02, 0.2):.3f}"
            for worker, step in itertools.product(range(1, 5), range(steps))
            if dice.random() < 0.05
        ]
        faults = "\n".join(stalls)
        x = run_job(5, task_s, steps, ("--backup", "1"), faults, nproc=5)
        found.dropping_s += x.step_s
        found.shares.append(x.dropped)
        found.waiting_s += run_job(5, task_s, steps, (), faults, nproc=5).step_s
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    ended: list[float]  # each step, seconds since the epoch
    slow: list[tuple[float, str]]  # reports of slow workers, and when
    digest: str
    suspended: int
    dropped: float  # share of the samples

    @property
    def step_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.ended)]


def run_job(
    vranks: int, task_s: float, steps: int, flags: tuple[str, ...], faults: str, nproc: int = 4
) -> Job:
    """Run a job of workers with these faults."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "out.json"
        (folder / "faults.txt").write_text(faults)
        options = ["--nproc", str(nproc), "--virtual", str(vranks), *flags]
        options += ["--faults", str(folder / "faults.txt")]
        script = str(Path(__file__).with_name("stragglers_worker.py"))
        command = [script, str(steps), str(task_s), str(out)]
        with LocalRun(folder / "run", options, command) as run:
            assert run.wait(RUN_S) == 0, run.log()
            said = [(e["time"], e["text"]) for e in run.events("slow")]
            aside = [e for e in run.events("view") if "is suspended" in e["text"]]
        told = json.loads(out.read_text())
        report = verify(folder / "run", SamplePlan.from_dict)
        return Job(
            ended=told["ended"],
            slow=[each for each in said if "not slow any more" not in each[1]],
            digest=told["digest"],
            suspended=len(aside),
            dropped=report.dropped / (report.dropped + report.samples),
        )


def main() -> None:
    for pattern in PATTERNS:
        for workers in (4, 64):
            x = detect(pattern, workers, 20)
            print(pattern, workers, len(x.latencies), "of", x.cases, statistics.mean(x.latencies))
    for workers in (4, 64, 1000):
        print(false_alarms(workers, 100_000))
    print(detect_real("", [1.5]))
    for workers, vranks in ((4, 16), (1000, 4000)):
        print(workers, vranks, change_ms(workers, vranks))
    print(rebalance(16, 0.1, 1))
    x = speculate(1)
    for times in (x.waiting_s, x.going_on_s):
        print(sorted(times)[-12:], statistics.mean(times))
    print(x.suspended, x.digests)
    y = backup(1)
    for times in (y.waiting_s, y.dropping_s):
        print(statistics.median(times), statistics.quantiles(times, n=100)[98], max(times))
    print(y.shares)


if __name__ == "__main__":
    main()
