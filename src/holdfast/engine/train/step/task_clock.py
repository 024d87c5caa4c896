"""Times a worker's own tasks of a step: on the host, or on the GPU where they run there.

Waiting for others does not count: the times are compared between workers to find slow ones.
"""

from __future__ import annotations

import time

import torch


class TaskClock:
    """Times one task at a time. `device`: a GPU, or None for the host."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._began = 0.0
        self._host_s = 0.0
        self._first: torch.cuda.Event | None = None  # of the task that is running
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Begin a new step."""
        self._host_s = 0.0
        self._events = []

    def begin(self) -> None:
        if self._device is None:
            self._began = time.perf_counter()
        else:
            self._first = self._record()

    def end(self) -> None:
        if self._device is None:
            self._host_s += time.perf_counter() - self._began
        elif self._first is not None:
            self._events.append((self._first, self._record()))
            self._first = None

    def step_us(self) -> int:
        """Return the microseconds of all tasks that have ended since the reset.

        It waits for the GPU to have done them. Another thread may be in the midst of a task.
        """
        ended = [*self._events]
        for _, end in ended:
            end.synchronize()
        on_gpu_ms = sum(begin.elapsed_time(end) for begin, end in ended)
        return int(self._host_s * 1e6 + on_gpu_ms * 1e3)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
