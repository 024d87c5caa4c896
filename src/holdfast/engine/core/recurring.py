"""Reports a failure that repeats itself once, then ever more seldom. Pure."""

from __future__ import annotations


class Recurring:
    """Counts the failures of something that is tried again and again."""

    def __init__(self) -> None:
        self._failures = 0  # in a row

    def count_failure(self, what: str, problem: str) -> str:
        """Count a failure; return a line about it, or "" if it was reported recently."""
        self._failures += 1
        count = self._failures
        if count == 1:
            return f"{what} is not saved: {problem}"
        if str(count).strip("0") == "1":  # 10, 100, ...
            return f"{what} is not saved, nor were the {count - 1} before it: {problem}"
        return ""

    def forget_failures(self) -> str:
        """Forget the failures; return how many there were, to follow a line; else nothing."""
        count, self._failures = self._failures, 0
        many = "one before it was" if count == 1 else f"{count} before it were"
        return f"; the {many} not" if count else ""
