"""Finds when a whole job stood still, and which workers have not recorded their times.

In such a time no process of the job ran: all of them had ended and the job was resumed later, or
all were frozen at once. It is neither productive nor lost time of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.core.types import read_spans
from holdfast.engine.records.incident_costs import Part, Stretch
from holdfast.engine.records.incidents import Event
from holdfast.engine.records.time_lines import ProcessTimes, TimeUse

Interval = tuple[float, float]
NUMBERS_MAX = 1_000_000  # workers in a line of the event log


def find_still_times(
    processes: Sequence[ProcessTimes], events: Sequence[Event], stretches: Sequence[Stretch]
) -> list[Interval]:
    """Return the intervals in which the whole job stood still, in order.

    `stretches`: the time of all workers; they tell when one of them was at work after all.
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
    """Return the parts of intervals that are in none of the others."""
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
    """Return how long workers without times were members of views, and how long all were.

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
