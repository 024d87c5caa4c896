"""Decides how members feed workers that follow, on both sides. Pure.

All members agree in their votes on an order to feed. At the next boundary each of the first 16
copies its share of the state, and from then on sends its pieces of all reduced gradients: a
follower with all shares and all pieces holds the members' state. In the step after the next one
all members compare their states: a follower may join once it is known that they agree.

A follower loads the state once all shares of it are here, and then applies one reduced gradient
after the other, as if it had taken part. If a member holds a wrong part of the state, the follower
may have loaded it. So it counts as up to date only once the members have compared all their copies:
if their copies differ, their view ends, and the order with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.ground.effects import (
    Begin,
    Commit,
    CopyState,
    Follow,
    Forget,
    KeepStep,
    ObtainState,
    ObtainStep,
    Outcome,
)
from holdfast.engine.core.ground.events import (
    EventNoted,
    FollowerBehind,
    SinkKind,
    SourceKind,
    StateFed,
    StateObtained,
    StepFed,
    StepObtained,
)
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.types import NO_VIEW, WorkerId
from holdfast.engine.core.views import FollowOrder, View
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage

# The state is not copied at boundaries between loops; an order waits for this number of them.
SKIPPED_MAX = 2
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
        """Take the order by which this member of `view` feeds followers, or None."""
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
        """Record that this order cannot be carried out."""
        self.unfed = max(self.unfed, number)
        if number == self._agreed:
            self._base = None

    def fall_behind(self, event: FollowerBehind) -> list[Outcome]:
        """Return the order to drop a follower that is too slow, and why.

        The follower finds its connection closed, and joins later, when the state is sent while all
        wait. Feeding ends if no other follower is left.
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
        """Return the order to send a step that is committed, if followers are fed."""
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


FedEvent = StateFed | StateObtained | StepFed | StepObtained


class Following:
    """Keeps the feed of one worker. `compares`: the members compare their copies."""

    def __init__(self, standing: Standing, *, compares: bool) -> None:
        self.order: FollowOrder | None = None
        self.opened = -1  # the step that the script has opened
        self._standing = standing
        self._compares = compares
        self._is_compared = False  # the copies for this order are equal
        self._base: int | None = None  # the state after this number of steps is here
        self._is_loaded = False
        self._steps: set[int] = set()  # steps whose gradients are here
        self._taking = -1
        # Feeding has ended, and the script waits for a step that will not come.
        self._is_stranded = False
        self._last = 0  # the number of the newest order that was begun

    @property
    def is_fed(self) -> bool:
        """Return whether members feed this worker, as far as it knows."""
        return self.order is not None

    @property
    def joins_fed(self) -> bool:
        """Return whether it is a member, and may still have to apply steps of its feed."""
        view, standing = self._standing.view, self._standing
        return view is not None and view.feeds(standing.me) and standing.acts and self.is_fed

    @property
    def is_fed_outside(self) -> bool:
        """Return whether members feed this worker, and it is none of them yet."""
        return self.is_fed and not self.joins_fed

    def heed(self, order: FollowOrder | None) -> None:
        """Begin to follow an order that names this worker, and end an older one.

        After a feed that has failed, a worker holds a state that no other feed continues. If the
        coordinator makes an order before it knows that, this worker reports the order as failed.
        """
        status, mine = self._standing.status, self.order
        ended = mine is not None and (order is None or order.number != mine.number)
        if ended:
            self.end()
            status = self._standing.status
        named = order is not None and order.names(status.worker, status.incarnation)
        ready = status.stage is Stage.READY and not self._standing.acts
        is_new = order is not None and named and ready and order.number > self._last
        if is_new and order is not None:
            self._last = order.number
            if status.state is ReplicaStage.ABSENT:
                self.order = order
                self._standing.order(Follow(order))
            else:
                self._standing.change(unfed=max(status.unfed, order.number))
        if ended or is_new:
            self._standing.tell()

    def end(self) -> None:
        """Forget the feed; a state that receives no further steps is of no use."""
        if self.order is None:
            return
        has_state = self._standing.status.has_state
        self.order = self._base = None
        self._is_stranded = has_state
        self._is_loaded, self.opened, self._taking = False, -1, -1
        self._is_compared = False
        self._steps.clear()
        self._standing.order(Follow(None))
        if has_state:
            self._become(state=ReplicaStage.OBTAINING)

    def end_as_member(self) -> None:
        """Forget the feed: this worker is a member now, and holds the state."""
        self.end()
        self._is_stranded = False

    def hear(self, event: FedEvent) -> bool:
        """Take in a message of the feed; return whether a step was applied."""
        if isinstance(event, StepObtained):
            if event.step != self._taking:
                return False
            self._taking = -1
            self._steps.discard(event.step)
            self._become(committed=event.step + 1, phase=Phase.SCRIPT)
            self._standing.order(Commit(event.step))
            return True
        if self.order is None or event.order != self.order.number:
            return False
        match event:
            case StateFed(_, step):
                self._base = step
            case StepFed(_, step, compared):
                self._steps.add(step)
                self._is_compared |= compared
            case StateObtained():
                self._is_loaded = True
                self._become(state=ReplicaStage.CURRENT, committed=self._base)
        return False

    def follow(self) -> bool:
        """Load or apply the next part of the feed once the script waits; return whether it does."""
        status, order = self._standing.status, self.order
        at_boundary = status.phase is Phase.BOUNDARY
        if order is None or self._taking >= 0:
            idle = self._is_stranded and status.phase is Phase.COMPUTING
            return idle and self._become(phase=Phase.WAITING)
        if not self._is_loaded:
            fresh = status.state is ReplicaStage.ABSENT and status.promised < order.view
            if self._base is None or not fresh or not at_boundary:
                return False  # after a promise the next view may count on the state as it was then
            self._become(state=ReplicaStage.OBTAINING)
            base, number = self._base, order.number
            self._standing.order(ObtainState(SourceKind.FEED, order.view, base, number))
            return True
        step = status.committed
        if step in self._steps:
            if at_boundary:
                self._become(phase=Phase.COMPUTING)
                self._standing.order(Begin(step))
                return True
            if self.opened != step or status.phase is Phase.SCRIPT:
                return False
            self._taking = step
            self._standing.order(ObtainStep(SourceKind.FEED, order.view, step))
            return True
        if self.opened == step and status.phase is Phase.COMPUTING:
            return self._become(phase=Phase.WAITING)
        compared = self._is_compared or not self._compares
        if at_boundary and compared and status.abreast < order.number:
            return self._become(abreast=order.number)
        return False

    def _become(self, **fields: object) -> bool:
        self._standing.change(**fields)
        self._standing.tell()
        return True
