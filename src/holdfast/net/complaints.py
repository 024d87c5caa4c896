"""A log that strangers cannot flood: some lines at once, then one line with a count.

It has no clock: the caller passes the time and calls `flush` at the deadline. Every complaint is
either a line of its own or counted in one.
"""

from __future__ import annotations

from collections.abc import Callable


class Complaints:
    """At most `lines_max` lines, and one that counts the rest, in every `window_s`."""

    def __init__(
        self, say: Callable[[str], None], lines_max: int = 10, window_s: float = 10.0
    ) -> None:
        self.window_s = window_s
        self._say = say
        self._lines_max = lines_max
        self._lines = 0  # in the present window
        self._held = 0
        self._last = ""
        self._ends_at: float | None = None  # of the present window; None: no window is open

    def deadline(self) -> float | None:
        """When `flush` is due; None while there is nothing to wait for."""
        return self._ends_at

    def add(self, text: str, now: float) -> None:
        self.flush(now)
        if self._ends_at is None:
            self._ends_at = now + self.window_s
        if self._lines < self._lines_max:
            self._lines += 1
            self._say(text)
        else:
            self._held += 1
            self._last = text

    def flush(self, now: float, force: bool = False) -> None:
        """Close the window if it is over (or `force`) and tell what it held back."""
        if self._ends_at is None or (now < self._ends_at and not force):
            return
        if self._held:
            self._say(f"and {self._held} more in {self.window_s:g} s, the last: {self._last}")
        self._lines, self._held, self._last, self._ends_at = 0, 0, "", None
