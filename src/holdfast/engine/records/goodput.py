"""Shares out the time of a run: what part of wall time x workers was productive, and the rest.

It reads the times that the workers wrote (time_lines.py) and the event log. Each worker has a place
from the time when it was first there to the end of the run. Its processes wrote the parts of its
time; the time in which it had no process is `degraded`. So all parts sum up to all time.

At times no process of the job ran: all of them had ended and the job was resumed later, or all were
frozen at once. Such a time is neither productive nor lost time of workers.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.core.types import read_spans
from holdfast.engine.records.incidents import (
    Event,
    IncidentCost,
    Part,
    Stretch,
    charge,
    find_unsaved,
    list_incidents,
)
from holdfast.engine.records.time_lines import (
    ProcessTimes,
    SpentLine,
    TimeUse,
    class_seconds,
    find_quantile,
    read_times,
)

MEANINGS = {
    Part.PRODUCTIVE: "tasks of committed steps, and the script's own lines between them",
    Part.WAITING: "for other workers: their tasks, sums, votes",
    Part.DATA: "for batches",
    Part.STATES: "loading and packing states of virtual ranks (job.rank_state)",
    Part.CHECKS: "tasks computed to compare them, or copied from late workers",
    Part.AGAIN: "tasks computed again, or computed for a worker that was lost",
    Part.LOST: "steps that were thrown away, because the job went back",
    Part.SAVING: "copying the state for a checkpoint, for memory or for others",
    Part.STALLED: "no view could commit a step",
    Part.TRANSFER: "receiving the state, or steps that were missed",
    Part.STARTING: "a process started, its script ran to its first step",
    Part.SPARE: "ready, as a spare",
    Part.ENDING: "waiting at the end of a loop",
    Part.DEGRADED: "a worker had no process, or a frozen one",
}
_PARTS = {
    TimeUse.STARTING: Part.STARTING,
    TimeUse.JOINING: Part.STARTING,
    TimeUse.TRANSFER: Part.TRANSFER,
    TimeUse.DATA: Part.DATA,
    TimeUse.TASK: Part.PRODUCTIVE,
    TimeUse.AGAIN: Part.AGAIN,
    TimeUse.CHECK: Part.CHECKS,
    TimeUse.STATES: Part.STATES,
    TimeUse.UPDATE: Part.PRODUCTIVE,
    TimeUse.SAVE: Part.SAVING,
    TimeUse.WAIT: Part.WAITING,
    TimeUse.SPARE: Part.SPARE,
    TimeUse.STALL: Part.STALLED,
    TimeUse.END: Part.ENDING,
    TimeUse.FROZEN: Part.DEGRADED,
}
_OF_STEPS = frozenset(
    (Part.PRODUCTIVE, Part.WAITING, Part.DATA, Part.STATES, Part.CHECKS, Part.AGAIN, Part.SAVING)
)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
Interval = tuple[float, float]
NUMBERS_MAX = 1_000_000  # workers in a line of the event log


@dataclass(slots=True, kw_only=True)
class Goodput:
    """Describes where the time of a run went. Times since the epoch, durations in seconds."""

    began: float
    ended: float
    #: Stretches of time, sorted by worker and time.
    stretches: list[Stretch] = field(default_factory=list)
    #: Committed steps.
    steps: int = 0
    #: Number of steps by class of length.
    step_counts: dict[int, int] = field(default_factory=dict)
    costs: list[IncidentCost] = field(default_factory=list)
    #: Times in which the whole job stood still.
    still: list[Interval] = field(default_factory=list)
    #: Seconds by worker without times.
    missing: dict[int, float] = field(default_factory=dict)
    #: Share of workers without times in the time of all workers.
    missing_share: float = 0.0
    #: A line on checkpoints that the run asked for and lacks.
    unsaved: str = ""

    @property
    def span_s(self) -> float:
        return self.ended - self.began

    @property
    def still_s(self) -> float:
        """Return the time in which the whole job stood still; no other figure contains it."""
        return measure_union(self.still)

    @property
    def wall_s(self) -> float:
        return self.span_s - self.still_s

    @property
    def workers(self) -> list[int]:
        return sorted({stretch.worker for stretch in self.stretches})

    @property
    def total_s(self) -> float:
        """Return the time of all places: wall time x workers if all were there from the start."""
        return sum(self.parts().values())

    def parts(self, worker: int | None = None) -> dict[Part, float]:
        """Return the seconds of each part, of one worker or of all."""
        found = dict.fromkeys(Part, 0.0)
        for each, parts in self.parts_by_worker().items():
            for part, seconds in parts.items() if worker in (None, each) else ():
                found[part] += seconds
        return found

    def parts_by_worker(self) -> dict[int, dict[Part, float]]:
        """Return the seconds of each part for each worker."""
        found: dict[int, dict[Part, float]] = {}
        for stretch in self.stretches:
            parts = found.setdefault(stretch.worker, dict.fromkeys(Part, 0.0))
            for part, seconds in stretch.parts.items():
                parts[part] += seconds
        return found

    @property
    def share(self) -> float:
        """Return the share of all time that was productive, which is the goodput."""
        total = self.total_s
        return self.parts()[Part.PRODUCTIVE] / total if total else 0.0

    @property
    def ettr(self) -> float:
        """Return the effective training time ratio.

        That is the share of wall time in which steps that count were under way: Kokolis et al.,
        Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025
        (arXiv:2410.21680), without the time in a queue.
        """
        training = []
        for stretch in self.stretches:
            seconds = sum(s for part, s in stretch.parts.items() if part in _OF_STEPS)
            training.append((stretch.began, stretch.began + seconds))
        return measure_union(training) / self.wall_s if self.wall_s else 0.0

    def step_quantile(self, share: float) -> float:
        """Return a step's duration in seconds, of which this share of all steps is not longer."""
        return find_quantile(self.step_counts, share)

    @property
    def step_seconds(self) -> float:
        """Return the sum of all steps' durations on each worker; right to 5 %."""
        return sum(class_seconds(number) * count for number, count in self.step_counts.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for scripts."""
        return {
            "wall_s": self.wall_s,
            "workers": len(self.workers),
            "total_s": self.total_s,
            "still_s": self.still_s,
            "missing_workers": sorted(self.missing),
            "missing_share": self.missing_share,
            "steps": self.steps,
            "goodput": self.share,
            "ettr": self.ettr,
            "parts": {part.value: seconds for part, seconds in self.parts().items()},
            "step_s": {name: self.step_quantile(q) for name, q in QUANTILES.items()},
            "unsaved": self.unsaved,
            "incidents": [
                {
                    "id": cost.incident.name,
                    "title": cost.incident.title,
                    "pause_s": cost.incident.cost.get("pause_s", 0.0),
                    "worker_s": {part.value: s for part, s in cost.parts.items()},
                }
                for cost in self.costs
            ],
        }


def measure_union(intervals_s: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each from its begin to its end."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals_s):
        total += max(ended - max(began, reached), 0.0)
        reached = max(reached, ended)
    return total


def share_out(run_dir: str | os.PathLike[str], events: Sequence[Event]) -> Goodput | None:
    """Return the uses of a run's time; None if its workers recorded no times.

    `events`: those of its event log.
    """
    return share_times(read_times(run_dir), events)


def share_times(processes: Sequence[ProcessTimes], events: Sequence[Event]) -> Goodput | None:
    """Return the uses of the time of these processes, which are all of one run."""
    if not processes:
        return None
    pairs = [(float(e["time"]), int(e["step"])) for e in events if _is_view(e)]
    views = _ViewSteps([(float(e["time"]), int(e["step"])) for e in events if _goes_back(e)])
    times = [float(event["time"]) for event in events]
    found = Goodput(
        began=min([p.began for p in processes] + times[:1]),
        ended=max([p.ended for p in processes] + times[-1:]),
    )
    formed_at = pairs[0][0] if pairs else found.ended
    of_worker = _by_worker(processes)
    for each in processes:
        for line in each.lines:
            found.steps = max(found.steps, line.step)
            for number, count in line.steps.items():
                found.step_counts[number] = found.step_counts.get(number, 0) + count
    leavers = _find_leavers(events)
    for worker, theirs in sorted(of_worker.items()):
        theirs.sort(key=lambda each: each.incarnation)
        begins = found.began if theirs[0].began < formed_at else theirs[0].began
        ends = theirs[-1].ended if worker in leavers else found.ended
        found.stretches += _stretches_of(theirs, begins, ends, views, formed_at)
    found.still = find_still_times(processes, events, found.stretches)
    found.stretches = leave_out(found.stretches, found.still)
    found.missing, named_s = measure_missing(of_worker, events, found.ended)
    found.missing_share = sum(found.missing.values()) / named_s if named_s else 0.0
    found.costs = charge(list_incidents(events), found.stretches)
    found.unsaved = find_unsaved(events)
    return found


class _ViewSteps:
    """Knows the steps to which the job went back. `views`: times and steps."""

    def __init__(self, views: Sequence[tuple[float, int]]) -> None:
        views = sorted(views)
        self._times = [time for time, _ in views]
        least = itertools.accumulate((step for _, step in reversed(views)), min)
        self._least = [*least][::-1]  # the least step in this view and all later ones

    def earliest_after(self, time: float, default: int) -> int:
        """Return the earliest step at which a view after this time resumed."""
        number = bisect.bisect_right(self._times, time)
        return self._least[number] if number < len(self._least) else default


def _is_view(event: Event) -> bool:
    return event["kind"] == "view" and isinstance(event.get("step"), int)


def _goes_back(event: Event) -> bool:
    """Return whether a view repeats committed steps, which are lost."""
    return _is_view(event) and event.get("again") is True


def _find_leavers(events: Sequence[Event]) -> set[int]:
    """Return workers that were asked to go, and did not come back: their places end with them."""
    found: set[int] = set()
    for event in events:
        worker = event.get("worker")
        if event["kind"] in ("leave", "drain") and isinstance(worker, int):
            found.add(worker)
        elif event["kind"] in ("join", "replaced") and isinstance(worker, int):
            found.discard(worker)
    return found


def _stretches_of(
    processes: Sequence[ProcessTimes],
    begins: float,
    ends: float,
    views: _ViewSteps,
    formed_at: float,
) -> Iterator[Stretch]:
    """Yield the time of one place without gaps."""
    at, worker = begins, processes[0].worker
    for process, until in zip(processes, [p.began for p in processes[1:]] + [ends], strict=True):
        first = process is processes[0] and process.began < formed_at
        if process.began > at:
            gap = Part.STARTING if first else Part.DEGRADED
            yield Stretch(worker, at, {gap: process.began - at})
            at = process.began
        step_before = process.lines[0].step if process.lines else 0
        for began, line in process.walk():
            kept = _clip(line, began, at, max(until, at))
            if kept is not None:
                parts = _parts_of(line, step_before, at, views)
                parts = {part: s * kept for part, s in parts.items()}
                yield Stretch(worker, at, parts, line.step)
                at += sum(parts.values())
            step_before = line.step
    if ends > at:
        yield Stretch(worker, at, {Part.DEGRADED: ends - at})


def _clip(line: SpentLine, began: float, least: float, most: float) -> float | None:
    """Return the share of a line that lies between two times; None if no part does."""
    seconds = line.seconds
    inside = min(began + seconds, most) - max(began, least)
    return inside / seconds if seconds > 0 and inside > 0 else None


def _parts_of(line: SpentLine, step_before: int, at: float, views: _ViewSteps) -> dict[Part, float]:
    """Return the seconds by part. Steps that a later view goes back behind are lost."""
    parts: dict[Part, float] = {}
    for use, seconds in line.spent.items():
        part = _PARTS[use]
        parts[part] = parts.get(part, 0.0) + seconds
    kept_step = views.earliest_after(at, line.step)
    if line.step > kept_step:
        many = line.step - step_before
        share = min((line.step - kept_step) / many, 1.0) if many > 0 else 1.0
        lost = {part: parts[part] * share for part in parts if part in _OF_STEPS}
        parts = {part: seconds - lost.get(part, 0.0) for part, seconds in parts.items()}
        parts[Part.LOST] = parts.get(Part.LOST, 0.0) + sum(lost.values())
    return parts


def find_still_times(
    processes: Sequence[ProcessTimes], events: Sequence[Event], stretches: Sequence[Stretch]
) -> list[Interval]:
    """Return the intervals in which the whole job stood still, in order.

    `stretches`: the time of all workers; they show when one of them was at work after all.
    """
    frozen = [_find_frozen_times(each) for each in _by_worker(processes).values()]
    common = frozen[0] if frozen else []
    for each in frozen[1:]:
        common = _intersect(common, each)
    worked = [(s.began, s.ended) for s in stretches if not _is_idle(s)]
    return _subtract(sorted([*common, *_find_times_down(processes, events)]), worked)


def _is_idle(stretch: Stretch) -> bool:
    return all(part is Part.DEGRADED for part, seconds in stretch.parts.items() if seconds)


def _by_worker(processes: Iterable[ProcessTimes]) -> dict[int, list[ProcessTimes]]:
    found: dict[int, list[ProcessTimes]] = {}
    for each in processes:
        found.setdefault(each.worker, []).append(each)
    return found


def _find_frozen_times(processes: Iterable[ProcessTimes]) -> list[Interval]:
    lines = (pair for process in processes for pair in process.walk())
    return sorted(
        (at, at + line.seconds)
        for at, line in lines
        if {use for use, seconds in line.spent.items() if seconds} == {TimeUse.FROZEN}
    )


def _intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in both lists, which are sorted."""
    found, i, j = list[Interval](), 0, 0
    while i < len(some) and j < len(others):
        began, ended = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if began < ended:
            found.append((began, ended))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _find_times_down(processes: Sequence[ProcessTimes], events: Sequence[Event]) -> list[Interval]:
    """Return the times from the last sign of life to the moment at which the job was resumed."""
    found = []
    for resumed_at in [float(e["time"]) for e in events if e["kind"] == "resume"]:
        signs = [float(e["time"]) for e in events if e["time"] < resumed_at]
        signs += [min(each.ended, resumed_at) for each in processes if each.began < resumed_at]
        if signs:
            found.append((max(signs), resumed_at))
    return [(began, ended) for began, ended in found if began < ended]


def _subtract(some: Sequence[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the parts of the first intervals that no second one covers."""
    found = list(some)
    for began, ended in others:
        pieces = [(a, min(b, began)) for a, b in found] + [(max(a, ended), b) for a, b in found]
        found = sorted((a, b) for a, b in pieces if a < b)
    return found


def leave_out(stretches: Iterable[Stretch], still: Sequence[Interval]) -> list[Stretch]:
    """Return the stretches without the time in which the whole job stood still."""
    found: list[Stretch] = []
    for stretch in stretches:
        if still and _is_idle(stretch):
            for began, ended in _subtract([(stretch.began, stretch.ended)], still):
                parts = {Part.DEGRADED: ended - began}
                found.append(Stretch(stretch.worker, began, parts, stretch.step))
        else:
            found.append(stretch)
    return found


# ---------------------------------------------------------------- missing workers


def measure_missing(
    known: Iterable[int], events: Sequence[Event], ended: float
) -> tuple[dict[int, float], float]:
    """Return the time as members of views of the workers without times, and of all workers.

    `known`: the workers with times. Seconds.
    """
    views = [
        (float(e["time"]), read_spans(str(e.get("members", "")), NUMBERS_MAX))
        for e in events
        if e["kind"] == "view"
    ]
    have, missing, total_s = set(known), dict[int, float](), 0.0
    for number, (began, members) in enumerate(views):
        until = views[number + 1][0] if number + 1 < len(views) else ended
        for worker in members:
            total_s += until - began
            if worker not in have:
                missing[worker] = missing.get(worker, 0.0) + until - began
    return missing, total_s
