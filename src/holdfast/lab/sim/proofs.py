"""Checks proofs of the right to act: that all members of a view acted in it since some moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.engine.core.ground.events import Row
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.wrong_bits import Violation


@dataclass(slots=True)
class _Ceased:
    """Holds the members of a view that ceased first to act in it: at most two, and since when.

    `looked`: how many of the processes that ceased to act anywhere were looked at.
    """

    looked: int = 0
    first: dict[Key, float] = field(default_factory=dict)


class Proofs:
    """Remembers when processes ceased to act in views; raises Violation for a false proof."""

    def __init__(self, views: Mapping[int, View]) -> None:
        self._views = views
        self._voted: set[tuple[int, int]] = set()  # views and steps
        # By view and step: the members that have given their votes.
        self._given: dict[tuple[int, int], set[Key]] = {}
        # processes in the order in which they ceased: up to which view, and when
        self._ceased: list[tuple[Key, float, float]] = []
        self._by_view: dict[int, _Ceased] = {}

    def record_end(self, key: Key, now: float) -> None:
        """Record that a process ends."""
        self._ceased.append((key, math.inf, now))

    def record_promise(
        self, key: Key, before: WorkerStatus, status: WorkerStatus, now: float
    ) -> None:
        """Record that a process promises not to act any more in some views."""
        if status.promised > before.promised:
            self._ceased.append((key, status.promised, now))

    def record_vote(self, number: int, step: int) -> None:
        """Record that a worker commits a step by the votes of all members of a view."""
        view, given = self._views.get(number), self._given.get((number, step), set())
        if view is not None and len(given) < len(view.members):
            raise Violation(
                f"step {step} is committed in view {number} by {len(given)} votes of "
                f"{len(view.members)} members"
            )
        self._voted.add((number, step))

    def record_given_vote(self, number: int, row: Row, key: Key) -> None:
        """Record that a member begins to spread its vote."""
        vote = Vote.of(row)
        if vote.view != number:
            raise Violation(f"worker {key} votes in view {number} for view {vote.view}")
        self._given.setdefault((number, vote.step), set()).add(key)

    def check_proof(self, key: Key, number: int, step: int, proved_at: float) -> None:
        """Check that no member of a view had ceased to act in it at a moment of the world's time.

        `key`: of the worker that concludes it from a step. A member that has ended or promised is
        one from which the coordinator counts until it goes on without this worker.
        """
        if (number, step) not in self._voted:
            raise Violation(f"worker {key} takes step {step} for a proof: nobody voted for it")
        view = self._views.get(number)
        if view is None:
            return
        for other, ceased in self._find_first(view, proved_at).items():
            if other != key and ceased < proved_at:
                raise Violation(
                    f"worker {key} takes it for proved that all acted in view {number} at "
                    f"{proved_at:.3f}, but worker {other} had ceased to at {ceased:.3f}"
                )

    def _find_first(self, view: View, before: float) -> dict[Key, float]:
        """Return the members that ceased first, if any did before a time; each is looked at once.

        Two are enough: one of them may be the process that asks.
        """
        found = self._by_view.setdefault(view.number, _Ceased())
        while found.looked < len(self._ceased) and len(found.first) < 2:
            key, up_to, at = self._ceased[found.looked]
            if at >= before:
                break
            found.looked += 1
            if up_to >= view.number and view.includes(WorkerId(key[0]), Incarnation(key[1])):
                found.first.setdefault(key, at)
        return found.first
