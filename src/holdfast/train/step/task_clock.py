"""Times a worker's own tasks of a step: on the host, or on the GPU where they run there.

Waiting for others does not count: the times are compared between workers to find slow ones.
"""

from __future__ import annotations

import time

import torch


class TaskClock:
    """Times one task at a time. `device`: a GPU, or None for the host. `step_us` after the last."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._began = 0.0
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Begin a new step."""
        self._host_s = 0.0
        self._events.clear()

    def begin(self) -> None:
        if self._device is None:
            self._began = time.perf_counter()
        else:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events.append(pair)
            pair[0].record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        if self._device is None:
            self._host_s += time.perf_counter() - self._began
        else:
            self._events[-1][1].record(torch.cuda.current_stream(self._device))

    def step_us(self) -> int:
        """Microseconds of all tasks since the reset; waits for the GPU to have done them."""
        for _, end in self._events:
            end.synchronize()
        on_gpu_ms = sum(begin.elapsed_time(end) for begin, end in self._events)
        return int(self._host_s * 1e6 + on_gpu_ms * 1e3)
