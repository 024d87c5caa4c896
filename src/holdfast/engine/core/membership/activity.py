"""Finds out whether a process works or is idle, without its help.

Without a heartbeat a process is at work if it and its children use a fair amount of processor time,
or print. So a process that waits while it keeps a processor busy, as NCCL does, passes for one at
work; a script that writes its step to a file is judged by that alone.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE_MIN = 0.02  # share of one processor; threads that only watch something need less


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitySample:
    """Describes a process and its children at one moment."""

    at: float  # seconds
    cpu_s: float  # used so far
    printed: int  # bytes so far
    step: int | None = None  # in its heartbeat file


class ActivityMeter:
    """Watches one process. `observe` tells whether it was at work since the last look."""

    def __init__(self, first: ActivitySample) -> None:
        self._last = first

    def observe(self, sample: ActivitySample) -> bool:
        last, self._last = self._last, sample
        if sample.step is not None:
            return sample.step != last.step
        # What a process that it had started has used is no more in the sum once that has ended.
        busy = abs(sample.cpu_s - last.cpu_s) > SHARE_MIN * (sample.at - last.at)
        return busy or sample.printed != last.printed
