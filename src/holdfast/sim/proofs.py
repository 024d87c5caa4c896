"""Checks proofs of the right to act: that all members of a view acted in it since some moment."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.types import View, WorkerStatus
from holdfast.sim.arithmetic import Key
from holdfast.sim.wrong_bits import Violation


class Proofs:
    """Remembers when processes ceased to act in views; raises Violation for a false proof."""

    def __init__(self, views: Mapping[int, View]) -> None:
        self._views = views
        self._voted: set[tuple[int, int]] = set()  # views and steps
        self._ended: dict[Key, float] = {}
        self._promised: dict[Key, list[tuple[int, float]]] = {}  # up to which view, and when

    def record_end(self, key: Key, now: float) -> None:
        """Record that a process ends."""
        self._ended[key] = now

    def record_promise(
        self, key: Key, before: WorkerStatus, status: WorkerStatus, now: float
    ) -> None:
        """Record that a process promises not to act any more in some views."""
        if status.promised > before.promised:
            self._promised.setdefault(key, []).append((status.promised, now))

    def record_vote(self, number: int, step: int) -> None:
        """Record that a worker has heard the votes of all members of a view for a step."""
        self._voted.add((number, step))

    def check_proof(self, key: Key, number: int, step: int, proved_at: float) -> None:
        """Check that no member of a view had ceased to act in it at a moment of the world's time.

        `key`: of the worker that concludes it from a step. A member that has ended or promised is
        one from which the coordinator counts until it goes on without this worker.
        """
        if (number, step) not in self._voted:
            raise Violation(f"worker {key} takes step {step} for a proof: nobody voted for it")
        view = self._views.get(number)
        for member in view.members if view is not None else ():
            other: Key = (int(member.worker), int(member.incarnation))
            promised = [at for up_to, at in self._promised.get(other, ()) if up_to >= number]
            ceased = min([*promised, self._ended.get(other, proved_at)])
            if other != key and ceased < proved_at:
                raise Violation(
                    f"worker {key} takes it for proved that all acted in view {number} at "
                    f"{proved_at:.3f}, but worker {other} had ceased to at {ceased:.3f}"
                )
