"""Sums a run up in a few lines: steps, the use of time, the price of faults, and the time left.

The time left of a loop follows from the pace of its steps. The pace is measured over productive
time: pauses after faults, starts and transfers do not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.engine.records.goodput import Goodput
from holdfast.engine.records.incidents import IncidentCost, Part
from holdfast.engine.records.time_lines import SpentLine, TimeUse

PARTS_SHOWN = 4
INCIDENTS_SHOWN = 3
NAMED_MAX = 8

DATE_AND_TIME = "%Y-%m-%d %H:%M:%S"
STEPS_MIN = 5  # fewer measured steps give no estimate
WINDOW_S = 120.0  # length of the productive time that is measured
_STEADY = (
    *(TimeUse.DATA, TimeUse.TASK, TimeUse.CHECK, TimeUse.UPDATE),
    *(TimeUse.STATES, TimeUse.SAVE, TimeUse.WAIT, TimeUse.SPARE),
)


def summarize(goodput: Goodput) -> list[str]:
    """Return three lines on a run, and one for each of its newest incidents.

    A further one names checkpoints that are missing. None of them ends with a full stop.
    """
    many = describe_workers(len(goodput.workers))
    median = goodput.step_quantile(0.5)
    each = f", {describe_seconds(median)} a step" if median else ""
    steps = "1 step" if goodput.steps == 1 else f"{goodput.steps} steps"
    lines = [f"{steps} in {describe_seconds(goodput.wall_s)} on {many}{each}"]
    whose = f"the time of {many}" if goodput.missing else "all workers' time"
    total = goodput.total_s or 1.0
    parts = [(s / total, p) for p, s in goodput.parts().items() if p is not Part.PRODUCTIVE]
    most = sorted(parts, key=lambda item: -item[0])[:PARTS_SHOWN]
    rest = ", ".join(f"{part.value} {share:.1%}" for share, part in most if share >= 0.0005)
    lines.append(f"goodput {goodput.share:.1%} of {whose}" + (f"; {rest}" if rest else ""))
    # The reason of a job's failure is printed in any case.
    shown = [c for c in goodput.costs if c.incident.diagnosis.event["kind"] != "failed"]
    if goodput.costs or not goodput.unsaved:
        lines.append(_summarize_incidents(goodput))
    if goodput.unsaved:
        lines.append(goodput.unsaved)
    return [
        *lines,
        *describe_unseen(goodput),
        *map(_explain, shown[-INCIDENTS_SHOWN:]),
    ]


def describe_unseen(goodput: Goodput) -> list[str]:
    """Return sentences on time that the other figures lack, without a full stop at their ends."""
    found = []
    if goodput.still_s:
        seconds = describe_seconds(goodput.still_s)
        found.append(
            f"for {seconds} more the whole job was down or frozen, which no figure includes"
        )
    if goodput.missing:
        some = ", ".join(map(str, sorted(goodput.missing)[:NAMED_MAX]))
        more = " and others" if len(goodput.missing) > NAMED_MAX else ""
        found.append(
            f"the times of worker{'s' * (len(goodput.missing) > 1)} {some}{more} are missing, "
            f"{goodput.missing_share:.0%} of all workers' time: they are in the run directories of "
            "their own nodes"
        )
    return found


def _explain(cost: IncidentCost) -> str:
    """Return the cause of an incident, the party at fault, and advice in one line."""
    found = cost.incident.diagnosis
    title = f"{cost.incident.title}{found.place}"
    return f"{cost.incident.name}: {title}; at fault: {found.fault.value}; to do: {found.advice}"


def _summarize_incidents(goodput: Goodput) -> str:
    costs = goodput.costs
    if not costs:
        return "no incidents"
    pause_s = sum(cost.incident.cost.get("pause_s", 0.0) for cost in costs)
    steps = sum(int(cost.incident.cost.get("steps", 0)) for cost in costs)
    again = f", {steps} steps computed again" if steps else ""
    lost_s = sum(cost.seconds for cost in costs)
    many = "1 incident" if len(costs) == 1 else f"{len(costs)} incidents"
    pauses = f"pauses of {describe_seconds(pause_s)} in all{again}, " if pause_s else ""
    return f"{many}: {pauses}{describe_seconds(lost_s)} of workers' time lost" if lost_s else many


def describe_workers(count: int) -> str:
    """Return the number of workers, as words."""
    return "1 worker" if count == 1 else f"{count} workers"


def describe_seconds(seconds: float) -> str:
    """Return a duration with its unit, to three digits below two minutes."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return f"{hours // 24} d {hours % 24} h"


def format_clock(at: float, form: str = "%H:%M:%S") -> str:
    """Return a time, in seconds since the epoch, by this machine's clock; "unknown" if absurd."""
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def estimate_left_s(processes: Sequence[Sequence[SpentLine]]) -> float | None:
    """Return the seconds that the present loop still takes; None if it is unknown.

    `processes`: the newest lines of some processes, beginning with the process that wrote last.
    """
    left = next((lines[-1].left for lines in processes if lines and lines[-1].left), 0)
    paces = [pace for lines in processes if (pace := _measure_pace(lines)) is not None]
    if not left or not paces:
        return None
    steps, seconds = max(paces)
    return left * seconds / steps


def _measure_pace(lines: Sequence[SpentLine]) -> tuple[int, float] | None:
    """Return the steps of the window and their seconds; None if there are too few.

    The first line of a loop does not count, because first steps are slow.
    """
    steps, seconds = 0, 0.0
    for before, line in zip(reversed(lines[:-1]), reversed(lines[1:]), strict=True):
        if not line.left or before.left < line.left or seconds >= WINDOW_S:
            break  # another loop, or the job went back
        steps += before.left - line.left
        seconds += sum(line.spent.get(use, 0.0) for use in _STEADY)
    return (steps, seconds) if steps >= STEPS_MIN else None


def describe_left(seconds: float) -> str:
    """Return an estimate for people, in seconds or minutes as fits its size."""
    return f"about {describe_seconds(max(round(seconds), 1))} left"
