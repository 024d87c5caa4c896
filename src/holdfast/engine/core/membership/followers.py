"""Decides which workers are brought up to date while the members train. Pure.

An order names the followers that a view's members feed, and ends with the view. A follower that has
caught up joins by a view of its own. A worker that cannot be fed joins while all members wait for
the state to be sent.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.formation import candidates
from holdfast.engine.core.types import Incarnation, WorkerId, name_workers, say_of_workers
from holdfast.engine.core.views import Follower, FollowOrder
from holdfast.engine.core.worker_status import Stage, WorkerStatus

ORDERS_PER_TERM = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Followers:
    """Keeps the present order. `enabled`: workers are fed at all; else they wait for a pause."""

    enabled: bool
    #: The number of the newest order, greater than in any term before.
    newest: int
    order: FollowOrder | None = None
    #: The processes that cannot be fed.
    refused: frozenset[tuple[WorkerId, Incarnation]] = frozenset()

    def add_to(self, facts: Facts) -> Facts:
        """Return the facts with the workers that are fed, or have been."""
        if not self.enabled or facts.view is None:
            return facts
        now = [follower.worker for follower, _ in self._remaining(facts)]
        fed = frozenset([*now, *(s.worker for s in candidates(facts) if self.follows(s))])
        caught_up = self.caught_up(facts)
        return dataclasses.replace(facts, caught_up=caught_up, waiting_for=fed, feeding=bool(now))

    def follows(self, status: WorkerStatus) -> bool:
        """Return whether a candidate is fed, rather than joining in a pause."""
        key = status.worker, status.incarnation
        fit = status.address and not status.dirty and key not in self.refused
        return bool(self.enabled and fit)

    def caught_up(self, facts: Facts) -> tuple[Follower, ...]:
        """Return the followers that caught up, once all remaining ones have."""
        order, left = self.order, self._remaining(facts)
        done = [f for f, status in left if order is not None and status.abreast == order.number]
        return tuple(done) if len(done) == len(left) else ()

    def review(
        self, facts: Facts, room: int, *, may_order: bool
    ) -> tuple[Followers, list[Announce]]:
        """Return the order that holds now, and lines for the event log.

        `room`: how many more members there may be. `may_order`: the members train, and no change is
        planned.
        """
        found, lines, view = self, list[Announce](), facts.view
        if found.order is not None and (view is None or found.order.view != view.number):
            found = dataclasses.replace(found, order=None)
        if found.order is not None:
            order, found = found.order, found._refuse(facts)
            failed = any(status.unfed >= order.number for status in facts.known)
            if failed or not found._remaining(facts):
                who = name_workers([follower.worker for follower in order.followers])
                lines.append(Announce("join", f"{who} cannot be fed any more"))
                found = dataclasses.replace(found, order=None)
        if found.order is not None or view is None or not may_order or room <= 0:
            return found, lines
        chosen = [status for status in candidates(facts) if found.follows(status)][:room]
        if not chosen:
            return found, lines
        order = FollowOrder(
            number=found.newest + 1,
            view=view.number,
            followers=tuple(
                Follower(worker=s.worker, incarnation=s.incarnation, address=s.address)
                for s in chosen
            ),
        )
        who = say_of_workers([status.worker for status in chosen], "receives", "receive")
        lines.append(Announce("join", f"{who} the state while the others train"))
        return dataclasses.replace(found, order=order, newest=order.number), lines

    def _remaining(self, facts: Facts) -> list[tuple[Follower, WorkerStatus]]:
        """List the followers of the present order that can still be fed."""
        order, found = self.order, []
        for follower in order.followers if order is not None else ():
            status = facts.roster.status(follower.worker, follower.incarnation)
            if order is None or status is None or not facts.roster.is_ordered(status):
                continue
            agent = facts.roster.slots[follower.worker].agent
            here = agent not in facts.silent and not facts.roster.draining(agent)
            if here and status.stage is Stage.READY and status.unfed < order.number:
                found.append((follower, status))
        return found

    def _refuse(self, facts: Facts) -> Followers:
        """Return this with the followers in it that turned out not to be fed by the order."""
        order = self.order
        if order is None:
            return self
        failed = any(status.unfed >= order.number for status in facts.known)
        refused = set(self.refused)
        for follower in order.followers:
            status = facts.roster.status(follower.worker, follower.incarnation)
            if failed or (status is not None and status.unfed >= order.number):
                refused.add((follower.worker, follower.incarnation))
        return dataclasses.replace(self, refused=frozenset(refused))


def find_strays(facts: Facts, order: FollowOrder | None) -> list[WorkerStatus]:
    """Find workers that hold a state of some step, and are neither members nor fed any more."""
    view, found = facts.view, []
    if view is None:
        return []
    late = [(lag.worker, lag.incarnation) for lag in view.suspended]
    for status in facts.roster.newest.values():
        key = status.worker, status.incarnation
        holds = status.has_state or (status.dirty and status.committed > 0)
        if status.stage is not Stage.READY or not holds or not facts.roster.is_ordered(status):
            continue
        if view.includes(*key) or key in late or (order is not None and order.names(*key)):
            continue
        found.append(status)
    return sorted(found, key=lambda status: status.worker)
