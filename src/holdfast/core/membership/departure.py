"""Knows whether a node asks to be left, why, and when it will be gone."""

from __future__ import annotations

NEVER = float("inf")


class Departure:
    """Keeps the last request to leave a node. A node that leaves for good is never used again.

    `failing`: the check that failed, unless somebody asks for it.
    """

    def __init__(self) -> None:
        self.reason = self.failing = ""
        self.for_good = False
        self._by = NEVER

    def ask(self, reason: str, failing: str, for_good: bool, by: float) -> bool:
        """Take in a request, or (an empty reason) its end; return whether that is news."""
        if self.for_good and not for_good:
            return False
        news = by < self._by or (reason, failing) != (self.reason, self.failing)
        self.reason, self.failing, self.for_good = reason, failing, for_good
        self._by = min(self._by, by) if for_good else by
        return news

    def remaining_s(self, now: float) -> float:
        """Return the seconds until this node is taken away; infinite if that is not known."""
        return max(self._by - now, 0.0)
