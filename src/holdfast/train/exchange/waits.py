"""Notes when a member's own gradients were sent, and whose came last, to tell it in its votes.

A member waits for one peer after another. A wait that is not short ends when that peer's gradients
come: later than those of all peers before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from holdfast.core.step.link_detector import NOBODY, Wait

SHORT_S = 0.001  # not taken for waiting


class Waits:
    """Times the waits in one view. `clock`: seconds. Call `begin` when a vote is complete."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = 0.0  # the step
        self._ready = 0.0  # to send the last gradients
        self._sent = 0.0
        self._sending_s = 0.0
        self._since = 0.0  # the present wait began
        self._last = NOBODY
        self._until = 0.0  # its gradients came

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = self._ready = self._clock()
        self._sending_s = 0.0

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Surround the start of each exchange: where sending takes time, that is the network's."""
        began = self._clock()
        self._ready = began - self._sending_s
        yield
        self._sent, self._last = self._clock(), NOBODY
        self._sending_s += self._sent - began

    def awaits(self) -> None:
        """Note that it waits for messages from now on."""
        self._since = self._clock()

    def arrived(self, peer: int) -> None:
        """Note that the peer it waited for is there, and that it waits for the next."""
        began, self._since = self._since, self._clock()
        if self._since - began > SHORT_S:
            self._last, self._until = peer, self._since

    def told(self) -> Wait:
        """Return what the vote says of the step."""
        ready_us = int((self._ready - self._began) * 1e6)
        if self._last == NOBODY:
            return Wait(ready_us)
        return Wait(ready_us, self._last, int((self._until - self._sent) * 1e6))
