"""Decides what a worker does that is fed before it is a member. Pure.

It loads the state once all shares of it are here, and then applies one reduced gradient after the
other, as if it had taken part. If a member holds a wrong part of the state, this worker may have
loaded it. So it counts as up to date only once the members have compared all their copies: if
their copies differ, their view ends, and the order with it.
"""

from __future__ import annotations

from holdfast.engine.core.ground.effects import Begin, Commit, Follow, ObtainState, ObtainStep
from holdfast.engine.core.ground.ends import SourceKind
from holdfast.engine.core.ground.events import StateFed, StateObtained, StepFed, StepObtained
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.views import FollowOrder
from holdfast.engine.core.worker_status import Phase, Stage, StateCopy

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
        self._is_stranded = False  # feeding has ended, and nothing follows for its script
        self._last = 0  # the number of the newest order that was begun

    def heed(self, order: FollowOrder | None) -> None:
        """Begin to follow an order that names this worker, and end an older one.

        A worker that was fed in vain holds a state that nothing leads on from. An order that was
        made before the coordinator heard so cannot feed it, and is told to have failed.
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
            if status.state is StateCopy.INITIAL:
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
            self._become(state=StateCopy.DIRTY)

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
                self._become(state=StateCopy.CURRENT, committed=self._base)
        return False

    def follow(self) -> bool:
        """Load or apply the next part of the feed once the script waits; return whether it does."""
        status, order = self._standing.status, self.order
        at_boundary = status.phase is Phase.BOUNDARY
        if order is None or self._taking >= 0:
            idle = self._is_stranded and status.phase is Phase.COMPUTING
            return idle and self._become(phase=Phase.WAITING)
        if not self._is_loaded:
            fresh = status.state is StateCopy.INITIAL and status.promised < order.view
            if self._base is None or not fresh or not at_boundary:
                return False  # after a promise the next view may count on the state as it was then
            self._become(state=StateCopy.DIRTY)
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
