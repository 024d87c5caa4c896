"""Keeps strangers from flooding a log: the first lines are written, the rest only counted.

It has no clock: the caller passes the time and calls `flush` at the deadline. Every complaint is
either a line of its own or counted in one.
"""

from __future__ import annotations

from collections.abc import Callable


class Complaints:
    """Writes at most `lines_max` lines in every `window_s`, and one line that counts the rest."""

    def __init__(
        self, say: Callable[[str], None], lines_max: int = 10, window_s: float = 10.0
    ) -> None:
        self.window_s = window_s
        self._say = say
        self._lines_max = lines_max
        self._lines = 0  # written in the present window
        self._held = 0
        self._last = ""
        self._ends_at: float | None = None  # when the present window ends; None: none is open

    def deadline(self) -> float | None:
        """Return when `flush` is due; None while nothing is held back."""
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
        """Close the window if it is over (or `force`), and report the lines that it held back."""
        if self._ends_at is None or (now < self._ends_at and not force):
            return
        if self._held:
            self._say(f"and {self._held} more in {self.window_s:g} s, the last: {self._last}")
        self._lines, self._held, self._last, self._ends_at = 0, 0, "", None
