"""Measures how long the network takes with gradients, and whose took longest, for a member's votes.

Each message carries the time at which its sender began to send it, counted from the end of the last
vote, as each member saw it. So a member that computes longer, or that has itself waited for another
one, is not taken for a slow network.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine.core.ground.events import NOBODY, Wait

SHORT_S = 0.001  # shorter waits do not count


class Waits:
    """Times the waits in one view. `clock`: seconds. Call `begin` when a vote is complete."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = 0.0  # time when the step began
        self._since = 0.0  # time when the present wait began
        self._sent_us = 0  # time when this member began to send its last bucket
        self._longest = Wait()  # of those that were not short
        self._newest = Wait()  # for the message that was sent last, of those that were in time

    def begin(self) -> None:
        """Record that a step begins."""
        self._began = self._clock()

    def begin_bucket(self) -> None:
        """Record that this member sends another bucket: only waits after the last one count."""
        self._longest = self._newest = Wait()
        self._sent_us = self.now_us()

    def now_us(self) -> int:
        """Return the time that messages carry."""
        return int((self._clock() - self._began) * 1e6)

    def begin_wait(self) -> None:
        """Record that this member waits for messages from now on."""
        self._since = self._clock()

    def record_arrival(self, peer: int, sent_us: int) -> None:
        """Record that the awaited peer's messages are here, and that the next wait begins."""
        began, self._since = self._since, self._clock()
        now_us = self.now_us()
        found = Wait(peer, max(0, now_us - sent_us), now_us - self._sent_us)
        if self._since - began > SHORT_S:
            self._longest = max(found, self._longest, key=lambda wait: wait.counted_us)
        elif self._newest.peer == NOBODY or found.took_us < self._newest.took_us:
            self._newest = Wait(peer, found.took_us)

    def wait_of_step(self) -> Wait:
        """Return the times for the vote of this step."""
        return self._newest if self._longest.peer == NOBODY else self._longest
