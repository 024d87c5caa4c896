"""Decides when a job may end that its operator stops: after a last checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopping:
    """Waits for a checkpoint of step `after` or a later one, at most until `until`."""

    reason: str
    after: int
    until: float

    def is_over(self, durable: int, now: float) -> bool:
        """Return whether the job may end: `durable` is the step of the newest checkpoint."""
        return durable >= self.after or now >= self.until
