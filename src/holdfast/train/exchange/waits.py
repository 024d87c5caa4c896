"""Measures when a member sent its gradients, and whose came last, for its votes.

A member waits for one peer after another. A wait that is not short ends when that peer's gradients
come: later than those of all peers before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from holdfast.core.step.link_detector import NOBODY, Wait

SHORT_S = 0.001  # shorter waits do not count


class Waits:
    """Times the waits in one view. `clock`: seconds. Call `begin` when a vote is complete."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = 0.0  # time when the step began
        self._ready = 0.0  # time when the last gradients were ready to send
        self._sent = 0.0
        self._sending_s = 0.0
        self._since = 0.0  # time when the present wait began
        self._last = NOBODY
        self._until = 0.0  # time when its gradients came

    def begin(self) -> None:
        """Record that a step begins."""
        self._began = self._ready = self._clock()
        self._sending_s = 0.0

    @contextlib.contextmanager
    def surround_sending(self) -> Iterator[None]:
        """Surround the start of each exchange: the network takes the time that sending takes."""
        began = self._clock()
        self._ready = began - self._sending_s
        yield
        self._sent, self._last = self._clock(), NOBODY
        self._sending_s += self._sent - began

    def begin_wait(self) -> None:
        """Record that this member waits for messages from now on."""
        self._since = self._clock()

    def record_arrival(self, peer: int) -> None:
        """Record that the awaited peer's messages are here, and that the next wait begins."""
        began, self._since = self._since, self._clock()
        if self._since - began > SHORT_S:
            self._last, self._until = peer, self._since

    def wait_of_step(self) -> Wait:
        """Return the times for the vote of this step."""
        ready_us = int((self._ready - self._began) * 1e6)
        if self._last == NOBODY:
            return Wait(ready_us)
        return Wait(ready_us, self._last, int((self._until - self._sent) * 1e6))
