"""Decides which workers are brought up to date while others train, before they join. Pure.

The members of a view are told by an order whom to feed. An order ends with its view; who was fed
until nothing was missing joins by a view of its own. Who cannot be fed joins as the state is sent
while all wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from holdfast.core.membership.formation import Situation, candidates, spans
from holdfast.core.types import Follower, FollowOrder, Incarnation, Stage, WorkerId, WorkerStatus

ORDERS_PER_TERM = 1 << 20


class Followers:
    """Keeps the present order. `enabled`: workers are fed at all; else they wait for a pause."""

    def __init__(self, term: int, *, enabled: bool) -> None:
        self.order: FollowOrder | None = None
        self._enabled = enabled
        self._newest = term * ORDERS_PER_TERM
        self._refused: dict[tuple[WorkerId, Incarnation], bool] = {}  # that cannot be fed

    def review(self, situation: Situation, room: int, *, may_order: bool) -> Iterator[str]:
        """Look whether the order still holds, and give another; yields lines for the event log.

        `room`: for so many members more. `may_order`: the members train, and no change is planned.
        """
        order, view = self.order, situation.view
        if order is not None and (view is None or order.view != view.number):
            self.order = order = None
        if order is not None and not self._carried_out(order, situation):
            yield f"worker {spans([f.worker for f in order.followers])} cannot be fed any more"
            self.order = order = None
        if order is not None or view is None or not may_order or room <= 0:
            return
        chosen = [status for status in candidates(situation) if self.follows(status)][:room]
        if chosen:
            self._newest += 1
            self.order = FollowOrder(
                number=self._newest,
                view=view.number,
                followers=tuple(
                    Follower(worker=s.worker, incarnation=s.incarnation, address=s.address)
                    for s in chosen
                ),
            )
            names = spans([status.worker for status in chosen])
            yield f"worker {names} receives the state while the others train"

    def add_to(self, situation: Situation) -> Situation:
        """Return the situation with who is fed, or has been, in it."""
        if not self._enabled or situation.view is None:
            return situation
        order = self.order
        now = () if order is None else [f.worker for f, _ in self._left(order, situation)]
        fed = frozenset([*now, *(s.worker for s in candidates(situation) if self.follows(s))])
        abreast = self.abreast(situation)
        return dataclasses.replace(situation, abreast=abreast, waiting_for=fed, feeding=bool(now))

    def follows(self, status: WorkerStatus) -> bool:
        """Tell whether a candidate is fed, rather than joining in a pause."""
        key = status.worker, status.incarnation
        fit = status.address and not status.dirty and key not in self._refused
        return bool(self._enabled and fit)

    def abreast(self, situation: Situation) -> tuple[Follower, ...]:
        """Return who has been fed until nothing was missing, once all who are left have been."""
        order = self.order
        left = [] if order is None else self._left(order, situation)
        done = [f for f, status in left if order is not None and status.abreast == order.number]
        return tuple(done) if len(done) == len(left) else ()

    def _left(
        self, order: FollowOrder, situation: Situation
    ) -> list[tuple[Follower, WorkerStatus]]:
        found = []
        for follower in order.followers:
            status = situation.roster.status(follower.worker, follower.incarnation)
            if status is None or not situation.roster.ordered(status):
                continue
            agent = situation.roster.slots[follower.worker].agent
            here = agent not in situation.silent and not situation.roster.draining(agent)
            if here and status.stage is Stage.READY and status.unfed < order.number:
                found.append((follower, status))
        return found

    def _carried_out(self, order: FollowOrder, situation: Situation) -> bool:
        """Tell whether members feed by this order, and somebody is left whom they feed."""
        failed = any(status.unfed >= order.number for status in situation.known)
        for follower in order.followers:
            status = situation.roster.status(follower.worker, follower.incarnation)
            if failed or (status is not None and status.unfed >= order.number):
                self._refused[follower.worker, follower.incarnation] = True
        return not failed and bool(self._left(order, situation))


def strays(situation: Situation, order: FollowOrder | None) -> list[WorkerStatus]:
    """Find workers that hold a state of some step, and are neither members nor fed any more."""
    view, found = situation.view, []
    if view is None:
        return []
    late = [(lag.worker, lag.incarnation) for lag in view.suspended]
    for status in situation.roster.newest.values():
        key = status.worker, status.incarnation
        holds = status.has_state or (status.dirty and status.committed > 0)
        if status.stage is not Stage.READY or not holds or not situation.roster.ordered(status):
            continue
        if view.includes(*key) or key in late or (order is not None and order.names(*key)):
            continue
        found.append(status)
    return sorted(found, key=lambda status: status.worker)
