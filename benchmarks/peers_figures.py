"""Computes the figures of a run from its records: times, lost work, use of the samples.

The same rules hold for all frameworks. A step is in the model as its last attempt made it: a
framework that goes back to a checkpoint computes steps again; the model has lost the earlier ones.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peers_launch import WORKERS, Record, RunResult

FIRST_STEPS = 1  # not usual: everything is done for the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleUse:
    """Counts how the steps of the final model have used the samples of an epoch.

    `vain`: batches that were computed and are not in the model.
    """

    twice: int
    never: int
    vain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Describes how long one fault disturbed a run, in seconds.

    `pause_s`: the longest gap between two commits until all work again, less a usual step.
    `progress_s`: by how much the commit of the step after the struck one came late.
    `all_s`: from the fault until all workers have committed one step; None if they never did.
    `later_s`: by how much the whole training ended later.
    """

    pause_s: float
    progress_s: float
    all_s: float | None
    later_s: float


def commits(records: Iterable[Record]) -> list[Record]:
    """Return the records of steps that became part of the model, oldest first."""
    return [record for record in records if record["kind"] == "commit"]


def usual_step_s(result: RunResult) -> float:
    """Return the median gap between undisturbed steps; raises ValueError if there is none."""
    ends: dict[int, float] = {}
    for record in commits(result.records):
        if result.fault is None or record["at"] < result.struck_at:
            ends.setdefault(record["step"], record["at"])
    times = [at for step, at in sorted(ends.items()) if step >= FIRST_STEPS]
    if len(times) < 2:
        raise ValueError(f"{result.framework}: {len(times)} undisturbed steps, too few to time one")
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def final_attempts(records: Iterable[Record]) -> dict[int, int]:
    """Return for each step the last attempt that committed it."""
    return {record["step"]: record["attempt"] for record in commits(records)}


def sample_use(result: RunResult, batch: int = 8) -> SampleUse:
    """Count the samples that the final model has used twice or never, and the wasted batches."""
    final = final_attempts(result.records)
    outcome = {
        (record["pid"], number): record
        for record in result.records
        if record["kind"] in {"commit", "drop"}
        for number in range(record["first"], record["number"] + 1)
    }
    certain: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    perhaps: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    parts: dict[int, int] = {}
    begun = 0
    for record in result.records:
        if record["kind"] != "begin":
            continue
        begun += 1
        ended = outcome.get((record["pid"], record["number"]))
        step = record["step"] if ended is None else ended["step"]
        if final.get(step) != record["attempt"]:
            continue
        if ended is None:
            perhaps[step].append(tuple(record["samples"]))
        elif ended["kind"] == "commit":
            parts[step] = ended["parts"]
            if ended["counted"]:
                certain[step].add(tuple(record["samples"]))
    used: list[tuple[int, ...]] = []
    for step, batches in certain.items():
        # The process of a batch without an outcome has died. Its gradient is in the step if the
        # other processes report that there were more parts than they know of.
        rest = [each for each in dict.fromkeys(perhaps[step]) if each not in batches]
        used += [*batches, *rest[: max(parts[step] - len(batches), 0)]]
    counts = Counter(itertools.chain.from_iterable(used))
    return SampleUse(
        twice=sum(count - 1 for count in counts.values()),
        never=result.steps * WORKERS * batch - len(counts),
        vain=begun - len(used),
    )


def recovery_times(result: RunResult) -> RecoveryTimes:
    """Return the times of a run's fault; raises ValueError if no step came after it."""
    assert result.fault is not None
    usual = usual_step_s(result)
    made = commits(result.records)
    before = [record for record in made if record["at"] <= result.struck_at]
    after = [record for record in made if record["at"] > result.struck_at]
    fresh = [record["at"] for record in after if record["step"] > result.fault.step]
    if not fresh:
        raise ValueError(f"{result.framework}: no new step after the fault")
    back = all_back_at(after)
    until = fresh[0] if back is None else max(back, fresh[0])
    times = [before[-1]["at"], *(record["at"] for record in after if record["at"] <= until)]
    rest = result.steps - result.fault.step - result.fault.share
    return RecoveryTimes(
        pause_s=max(b - a for a, b in itertools.pairwise(times)) - usual,
        progress_s=fresh[0] - result.struck_at - (2.0 - result.fault.share) * usual,
        all_s=None if back is None else back - result.struck_at,
        later_s=made[-1]["at"] - result.struck_at - rest * usual,
    )


def all_back_at(after: Sequence[Record]) -> float | None:
    """Return when all workers had first committed one step after a fault, each with a batch."""
    done: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for record in after:
        if record["counted"] and record["first"] <= record["number"]:
            there = done[record["attempt"], record["step"]]
            there[record["pid"]] = record["at"]
            if len(there) == WORKERS:
                return float(record["at"])
    return None


def digests(result: RunResult) -> set[str]:
    """Return the digests of the models that came out: one, if all workers agree."""
    return {record["digest"] for record in result.records if record["kind"] == "end"}
