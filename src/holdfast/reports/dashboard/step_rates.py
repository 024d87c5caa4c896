"""Measures how many steps a run committed per second over time, by the files of its workers.

Where no worker tells of its time the rate is not known, which is not the same as no steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.records.time_lines import ProcessTimes

PARTS = 160
PART_S_MIN = 1.0
RECENT_S = 10.0
Rate = tuple[float, float | None]


def measure_rates(processes: Sequence[ProcessTimes]) -> list[Rate]:
    """Return the steps per second by seconds since the first process began, in equal parts.

    None: no line of any worker covers a piece of that part. Steps that were done again count again.
    """
    if not any(each.lines for each in processes):
        return []
    began, ended = min(p.began for p in processes), max(p.ended for p in processes)
    wall_s = max(ended - began, 1e-3)
    count = max(min(round(wall_s / PART_S_MIN), PARTS), 1)
    width = wall_s / count
    most: dict[int, float] = {}  # by part: steps of the worker with most of them in it
    for each in processes:
        for number, steps in _steps_by_part(each, began, width).items():
            most[number] = max(most.get(number, 0.0), steps)
    return [
        ((number + 0.5) * width, most[number] / width if number in most else None)
        for number in range(count)
    ]


def rate_now(processes: Sequence[ProcessTimes]) -> float | None:
    """Return the steps per second of the last 10 s that the files tell of; None: nothing known."""
    if not any(each.lines for each in processes):
        return None
    began, ended = min(p.began for p in processes), max(p.ended for p in processes)
    width = min(RECENT_S, ended - began)
    if width <= 0:
        return None
    recent = [_steps_by_part(each, ended - width, width).get(0, 0.0) for each in processes]
    return max(recent) / width


def _steps_by_part(process: ProcessTimes, began: float, width: float) -> dict[int, float]:
    """Return the steps in each part that a process tells of; parts have negative numbers, too.

    Steps whose length it tells count, and are spread over their line: those that it received
    together with the state are none of its own.
    """
    found: dict[int, float] = {}
    for line_began, line in process.walk():
        if line.seconds <= 0:
            continue
        steps = sum(line.steps.values())
        first, last = (line_began - began) / width, (line_began + line.seconds - began) / width
        for number in range(int(first // 1), int(-(-last // 1))):
            share = (min(last, number + 1) - max(first, number)) / (last - first)
            if share > 0:
                found[number] = found.get(number, 0.0) + steps * share
    return found
