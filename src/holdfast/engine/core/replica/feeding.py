"""Decides one member's part in feeding workers that follow, while it trains. Pure.

All members agree in their votes on an order to feed. At the next boundary each of the first 16
copies its share of the state, and from then on sends its pieces of all reduced gradients: a
follower with all shares and all pieces holds the members' state. In the step after the next one
all members compare their states: a follower may join once it is known that they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.ground.effects import CopyState, Forget, KeepStep, Outcome
from holdfast.engine.core.ground.ends import SinkKind
from holdfast.engine.core.ground.events import EventNoted, FollowerBehind
from holdfast.engine.core.types import NO_VIEW, WorkerId
from holdfast.engine.core.views import FollowOrder, View

SKIPPED_MAX = 2  # boundaries between loops, at which nothing is copied
# A follower has a connection and a thread for each member that feeds it.
FEEDERS_MAX = 16


def count_feeders(members: int) -> int:
    """Return the number of members, the first ones, that feed the followers of a view."""
    return min(members, FEEDERS_MAX)


class Feeding:
    """Keeps orders, agreements and copies; `unfed`: the newest order that has failed."""

    def __init__(self) -> None:
        self.unfed = 0
        self._order: FollowOrder | None = None
        self._agreed = 0
        self._due: int | None = None  # the state is copied after this many steps, or soon after
        self._skipped = 0
        self._base: int | None = None  # the first step that is fed
        self._is_compared = False  # the copies of all members are equal
        self._dropped: set[WorkerId] = set()  # followers that are too slow for this order

    def take_order(self, order: FollowOrder | None, view: View | None) -> list[Outcome]:
        """Take the order by which this member of `view` feeds others, or None."""
        if order is None or view is None or order.view != view.number:
            return self._end(finish=False)
        ended: list[Outcome] = []
        if self._order is None or order.number != self._order.number:
            ended = self._end(finish=False)
        self._order = order
        return ended

    def enter(self, view: View) -> list[Outcome]:
        """Begin another view, in which followers may be members."""
        return self._end(finish=bool(view.fed))

    def opinion(self) -> int:
        """Return the number of the order by which this member can feed; 0: none."""
        order = self._order
        return order.number if order is not None and order.number > self.unfed else 0

    def agree(self, number: int, after: int) -> None:
        """Record that all members can feed by this order, with the state after `after` steps."""
        if number > self._agreed:
            self._agreed, self._due, self._skipped = number, after, 0

    def next_copy(self, step: int, view: View, *, within: bool) -> list[Outcome]:
        """Return the order to copy, if it is due.

        `within`: the boundary lies between two steps of one loop; what a script does between two
        loops it would do again to a state copied there.
        """
        order = self._order
        if order is None or self._due is None or step < self._due or order.number != self._agreed:
            return []
        if not within:
            self._skipped += 1
            if self._skipped > SKIPPED_MAX:
                self.unfed, self._due = order.number, None
            return []
        self._due, self._base, self._is_compared = None, step, False
        return [CopyState(SinkKind.FOLLOWERS, step, view, order)]

    def record_copy(self, number: int, problem: str) -> None:
        """Record that the copy is made, or why it is not."""
        if problem:
            self.record_failure(number)

    def record_failure(self, number: int) -> None:
        """Record that nobody can be fed by this order."""
        self.unfed = max(self.unfed, number)
        if number == self._agreed:
            self._base = None

    def fall_behind(self, event: FollowerBehind) -> list[Outcome]:
        """Return the order to drop a follower that is too slow, and why.

        It hears that its connection has ended, and joins as the state is sent while all wait. If no
        other one is left, nobody is fed any more.
        """
        order = self._order
        if order is None or order.number != event.order or self._base is None:
            return []
        if event.worker in self._dropped:
            return []
        self._dropped.add(event.worker)
        waiting = f"{event.waiting_bytes / (1 << 20):,.0f} MiB of steps wait to be sent to it"
        why = f"worker {event.worker} is too slow to be fed while others train: {waiting}"
        if self._dropped.issuperset(follower.worker for follower in order.followers):
            self._base = None
            return [EventNoted("join", why), Forget(SinkKind.FOLLOWERS, order.view)]
        dropped = Forget(SinkKind.FOLLOWERS, order.view, follower=event.worker)
        return [EventNoted("join", why), dropped]

    def record_copies(self, copies: Sequence[int]) -> None:
        """Record fingerprints of the members' copies, which do not contradict each other.

        `copies`: by rank; 0 if a member shows none in this step.
        """
        if self._base is not None and copies and all(copies):
            self._is_compared = True

    def handle_commit(self, step: int) -> list[Outcome]:
        """Return what follows from the commit of a step."""
        order = self._order
        if self._base is None or step < self._base or order is None:
            return []
        return [KeepStep(SinkKind.FOLLOWERS, order.view, step, self._is_compared)]

    def _end(self, *, finish: bool) -> list[Outcome]:
        order, fed = self._order, self._base is not None
        self._order = self._due = self._base = None
        self._dropped.clear()
        view = NO_VIEW if order is None else order.view
        return [Forget(SinkKind.FOLLOWERS, view, finish=finish)] if fed else []
