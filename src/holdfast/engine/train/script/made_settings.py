"""Remembers the settings with which a job's script began, to find those that were changed since.

A job that goes on from a checkpoint keeps the rates, schedules and flags that are in its state,
whatever the script says now. Who has edited the script expects otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS_MAX = 1000  # settings that are kept
NAMED_MAX = 3  # changed settings that are named
_MISSING = "missing"


class MadeSettings:
    """Keeps the plain values of protected objects, as the script has made them; job state."""

    def __init__(self) -> None:
        self.changed: dict[str, tuple[str, str]] = {}  # by path: in the job, and in this script
        self._made: dict[str, str] = {}

    def begin(self, items: Mapping[str, str]) -> None:
        """Keep the values that the script has made, by their paths."""
        self._made = dict(list(items.items())[:SETTINGS_MAX])

    def state_dict(self) -> dict[str, str]:
        """Return the values with which the job began."""
        return dict(self._made)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Take over the values with which the job began, and find those that are others here."""
        if not state:  # an older release has saved none
            return
        for path in {**state, **self._made}:
            pair = state.get(path, _MISSING), self._made.get(path, _MISSING)
            if pair[0] != pair[1]:
                self.changed[path] = pair
        self._made = dict(state)

    def describe_changed(self) -> str:
        """Return a sentence on the settings that the script has changed; empty: it has not."""
        if not self.changed:
            return ""
        told = [f"{p} ({was} before, {now} now)" for p, (was, now) in self.changed.items()]
        more = len(told) - NAMED_MAX
        named = ", ".join(told[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        return (
            f"the script has changed since the job began: {named}. The job goes on with the values "
            "in its state; to use others, set them in the loop, from a step on (if step.index >= N)"
        )
