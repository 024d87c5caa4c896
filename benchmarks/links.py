"""Slow networks: how surely and soon they are found, and distinguished from slow computing."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.engine.core.ground.events import Wait
from holdfast.engine.core.step.link_detector import LinkDetector
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.exchange.seam import Waits
from labs.made_up_exchanges import BUCKETS, MadeUpExchange

BEGIN, WITHIN = 40, 20  # steps: when something becomes slow, and the limit for finding it
# How long a message takes, and how much of the computing is left when the first one can be sent.
SHAPES = ((0.0002, 0.2), (0.004, 0.2), (0.004, 0.0), (0.02, 0.2))
LATE_S = (0.06, 0.1, 0.2, 0.5)  # all messages of a step take longer by this
FACTORS = (1.2, 1.5, 2.0, 5.0)
CULPRIT, PEER = 1, 0
NETWORK, LINK, COMPUTING = "the network of a worker", "one link", "computing"


@dataclass(slots=True)
class Found:
    """Counts verdicts. `wrong`: verdicts on members other than the culprit, or of another kind."""

    cases: int = 0
    wrong: int = 0
    latencies: list[int] = field(default_factory=list)  # steps until found


def detect(what: str, workers: int, seeds: int) -> Found:
    """Make one thing slow; all its shapes and sizes, each with `seeds` seeds."""
    found = Found()
    for shape, size, seed in itertools.product(SHAPES, range(len(LATE_S)), range(seeds)):
        dice = random.Random(f"{what} {workers} {shape} {size} {seed}")
        made = MadeUpExchange(workers, dice, *shape)
        detector = LinkDetector([WorkerId(i) for i in range(workers)])
        computing = FACTORS[size] if what == COMPUTING else 1.0
        sending = 1.0 if what == COMPUTING else 1 + LATE_S[size] / shape[0] / BUCKETS
        expected = (CULPRIT, PEER if what == LINK else None)
        found.cases += 1
        for step in range(BEGIN + WITHIN):
            now = step >= BEGIN
            waits = made.step(
                _slow(computing if now else 1.0), _late(what, sending if now else 1.0)
            )
            compute_us = [int(s * 1e6) for s in made.took_s]
            for verdict in detector.observe(waits, compute_us):
                if what != COMPUTING and (verdict.worker, verdict.to) == expected and now:
                    found.latencies.append(step - BEGIN + 1)
                else:
                    found.wrong += 1
    return found


def _slow(factor: float) -> Callable[[int], float]:
    return lambda member: factor if member == CULPRIT else 1.0


def _late(what: str, factor: float) -> Callable[[int, int], float]:
    if what == LINK:
        return lambda a, b: factor if (a, b) == (CULPRIT, PEER) else 1.0
    return lambda a, b: factor if a == CULPRIT else 1.0


def false_alarms(workers: int, worker_steps: int) -> tuple[int, int]:
    """Count those of a sound job, and its worker-steps."""
    alarms, steps = 0, worker_steps // workers // len(SHAPES)
    for shape in SHAPES:
        made = MadeUpExchange(workers, random.Random(f"{workers} {shape}"), *shape)
        detector = LinkDetector([WorkerId(i) for i in range(workers)])
        for _ in range(steps):
            waits = made.step(_slow(1.0), _late(NETWORK, 1.0))
            verdicts = detector.observe(waits, [int(s * 1e6) for s in made.took_s])
            alarms += sum(v.slow for v in verdicts)
    return alarms, steps * workers * len(SHAPES)


def observe_us(workers: int, late: bool, steps: int = 200) -> float:
    """Return the leader's time to judge a step in which all wait for one, or no member waits."""
    dice = random.Random(workers)
    wait_us = 30_000 if late else 0
    rows = [
        [Wait((i + 1) % workers, dice.randrange(1000, 1500), 1500) for i in range(workers)]
        for _ in range(steps)
    ]
    for row in rows:
        for rank in range(1, workers):
            row[rank] = Wait(0, wait_us, wait_us)
    detector, compute_us = LinkDetector([WorkerId(i) for i in range(workers)]), [100_000] * workers
    times = []
    for row in rows:
        began = time.perf_counter()
        detector.observe(row, compute_us)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def wait_ns(waits: int = 100_000) -> float:
    """Return a member's time for each message that it waits for."""
    recorder = Waits(time.perf_counter)
    recorder.begin_wait()
    began = time.perf_counter()
    for _ in range(waits):
        recorder.record_arrival(1, 0)
    return (time.perf_counter() - began) / waits * 1e9


def main() -> None:
    for what in (NETWORK, LINK, COMPUTING):
        for workers in (4, 16):
            x = detect(what, workers, 5)
            print(what, workers, len(x.latencies), "of", x.cases, "wrong", x.wrong, x.latencies)
    for workers in (2, 4, 16):
        print(workers, false_alarms(workers, 40_000))
    for workers in (4, 64, 1000):
        print(workers, observe_us(workers, late=False), observe_us(workers, late=True), "us")
    print(wait_ns(), "ns a wait")


if __name__ == "__main__":
    main()
