"""Estimates how long the present loop of a run still takes, by the times that its workers write.

The pace is measured over productive time: pauses after faults, starts and transfers do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.records.summary import describe_seconds
from holdfast.engine.records.time_lines import SpentLine, TimeUse

STEPS_MIN = 5  # fewer measured steps give no estimate
WINDOW_S = 120.0  # length of the productive time that is measured
_STEADY = (
    *(TimeUse.DATA, TimeUse.TASK, TimeUse.CHECK, TimeUse.UPDATE),
    *(TimeUse.STATES, TimeUse.SAVE, TimeUse.WAIT, TimeUse.SPARE),
)


def estimate_left_s(processes: Sequence[Sequence[SpentLine]]) -> float | None:
    """Return the seconds that the present loop still takes; None if nothing can be said.

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
