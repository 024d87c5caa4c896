"""Lets simulated processes stop, freeze and go on: calls meanwhile wait.

A process can be stopped (it handles nothing until it is resumed), silent (the same, but its
counters move), or paused by its agent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.lab.sim.seams import Clock


class Running:
    """Simulates that a process runs, or does not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.alive = True
        self.stopped = False  # by a signal: the kernel shows state T
        self.silent = False  # in foreign code that holds the interpreter lock
        self.paused = False  # by its agent
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def post(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have this process do something later, if it still lives then."""
        self._clock.call_later(delay_s, self.deliver, call, args)

    def deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do something now, or once the process runs again."""
        if not self.alive:
            return
        if not self.is_running:
            self.backlog.append((call, args))
            return
        call(*args)

    @property
    def is_running(self) -> bool:
        """Return whether the process is neither stopped nor silent nor paused."""
        return not (self.stopped or self.silent or self.paused)

    def resume(self) -> None:
        """Go on, no longer frozen: handle what piled up at once, unless its agent paused it."""
        self.stopped = self.silent = False
        self.wake()

    def wake(self) -> None:
        """Handle the calls that have piled up."""
        while self.backlog and self.alive and self.is_running:
            call, args = self.backlog.popleft()
            call(*args)
