"""Keeps the feeds of a story's followers: shares of the state, and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import FollowOrder, View


@dataclass
class Feed:
    """Keeps the messages of one order; a command of the story makes them arrive."""

    order: FollowOrder
    view: View
    base: int
    shares: set[WorkerId] = field(default_factory=set)  # members that have sent their shares
    steps: dict[int, dict[WorkerId, bool]] = field(default_factory=dict)  # compared, by member
    has_arrived: bool = False  # the state
    next: int = 0  # the step that arrives next


class Feeds:
    """Keeps the feeds of a cluster, by the views in which they were ordered."""

    def __init__(self) -> None:
        self._by_view: dict[int, Feed] = {}
        self._followed: dict[WorkerId, FollowOrder] = {}
        self._asked: dict[WorkerId, ef.ObtainState] = {}  # states that are loaded

    def copied(self, worker: WorkerId, copy: ef.CopyState) -> None:
        """Record that a member has copied its share of the state, and sends it."""
        assert copy.order is not None, "followers are fed by an order"
        new = Feed(copy.order, copy.view, copy.step, next=copy.step)
        feed = self._by_view.setdefault(copy.view.number, new)
        feed.shares.add(worker)

    def attend(self, worker: WorkerId, effect: ef.WorkerEffect) -> Iterator[ev.WorkerEvent]:
        """Take in an effect of a feed; a step that has arrived is put in its place at once."""
        match effect:
            case ef.Follow(None):
                self._followed.pop(worker, None)
            case ef.Follow(order):
                self._followed[worker] = order
            case ef.KeepStep(SinkKind.FOLLOWERS, view, step, compared):
                self._by_view[view].steps.setdefault(step, {})[worker] = compared
            case ef.ObtainState(SourceKind.FEED):
                self._asked[worker] = effect
            case ef.ObtainStep(SourceKind.FEED, view, step):
                yield ev.StepObtained(SourceKind.FEED, view, step)

    def arrives(self, worker: WorkerId) -> ev.StateFed | ev.StepFed | None:
        """Return the next event of a follower; None if a member has yet to send its part."""
        order = self._followed.get(worker)
        feed = self._by_view.get(order.view) if order is not None else None
        if order is None or feed is None or feed.shares != set(feed.view.workers):
            return None
        if not feed.has_arrived:
            feed.has_arrived = True
            return ev.StateFed(order.number, feed.base)
        parts = feed.steps.get(feed.next, {})
        if set(parts) != set(feed.view.workers):
            return None
        feed.next += 1
        return ev.StepFed(order.number, feed.next - 1, all(parts.values()))

    def loaded(self, worker: WorkerId) -> list[ev.WorkerEvent]:
        """Load the state that a follower was asked to load."""
        order = self._asked.pop(worker, None)
        if order is None:
            return []
        return [ev.Loading(), ev.StateObtained(SourceKind.FEED, order.view, order.order)]
