"""Decides for how long a worker waits for a store that does not answer. Pure."""

from __future__ import annotations

from holdfast.engine.core.ground.effects import GiveUp, Outcome
from holdfast.engine.core.ground.events import EventNoted


class StoreWait:
    """Keeps since when the store is silent. `patience_s`: how long it may be."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def record_answer(self) -> None:
        """Record that the store has answered."""
        self._since = None

    def record_silence(self, reason: str, now: float) -> list[Outcome]:
        """Record that it is silent: the next view asks it again, until the time is over."""
        told: list[Outcome] = []
        if self._since is None:
            self._since = now
            told.append(EventNoted("store", f"{reason}; it is asked again"))
        waited_s = now - self._since
        if waited_s >= self._patience_s:
            text = f"{reason}: given up after {waited_s:.0f} s; go on with `holdfast resume` once"
            told.append(GiveUp(f"{text} the store answers"))
        return told
