"""Decides what a worker does that is fed before it is a member. Pure.

It loads the state once all shares of it are here, and then applies one reduced gradient after the
other, as if it had taken part. If a member holds a wrong part of the state, this worker may have
loaded it. So it counts as up to date only once the members have compared all their copies: if
their copies differ, their view ends, and the order with it.
"""

from __future__ import annotations

from holdfast.core.step.effects import (
    BecameFed,
    Begin,
    Commit,
    Follow,
    LoadFed,
    Outcome,
    TakeFed,
    Unfollow,
)
from holdfast.core.step.events import FedLoaded, FedTaken, StateFed, StepFed
from holdfast.core.types import FollowOrder, Phase, Stage, StateCopy, WorkerStatus

FedEvent = StateFed | FedLoaded | StepFed | FedTaken


class Following:
    """Keeps what one worker was fed. `compares`: the members compare their copies."""

    def __init__(self, *, compares: bool) -> None:
        self.order: FollowOrder | None = None
        self.opened = -1  # the step that the script has opened
        self._compares = compares
        self._is_compared = False  # the copies for this order are equal
        self._base: int | None = None  # the state after so many steps is here
        self._is_loaded = False
        self._steps: set[int] = set()  # whose gradients are here
        self._taking = -1
        self._is_stranded = False  # it was fed, and is no more: nothing follows for its script
        self._last = 0  # the number of the newest order that was begun

    def ordered(
        self, order: FollowOrder | None, status: WorkerStatus, *, acts: bool
    ) -> list[Outcome]:
        """Hear by which order workers are fed; `acts`: this one is a member already."""
        out: list[Outcome] = []
        mine = self.order
        if mine is not None and (order is None or order.number != mine.number):
            out += self.end(status)
        named = order is not None and order.names(status.worker, status.incarnation)
        fresh = status.stage is Stage.READY and status.state is StateCopy.INITIAL
        if order is not None and named and fresh and not acts and order.number > self._last:
            self.order, self._last = order, order.number
            out.append(Follow(order))
        return out

    def end(self, status: WorkerStatus) -> list[Outcome]:
        """Forget what was fed; a state that is not brought up to date any more is of no use."""
        if self.order is None:
            return []
        self.order = self._base = None
        self._is_stranded = status.has_state
        self._is_loaded, self.opened, self._taking = False, -1, -1
        self._is_compared = False
        self._steps.clear()
        spoils = [BecameFed(state=StateCopy.DIRTY)] if status.has_state else []
        return [Unfollow(), *spoils]

    def joined(self, status: WorkerStatus) -> list[Outcome]:
        """Forget what was fed: it is a member now, and holds the state however it came by it."""
        ended = self.end(status)
        self._is_stranded = False
        return ended

    def heard(self, event: FedEvent, status: WorkerStatus) -> list[Outcome]:
        """Take in what has come, or was done with it."""
        if isinstance(event, FedTaken):
            if event.step != self._taking:
                return []
            self._taking = -1
            self._steps.discard(event.step)
            return [BecameFed(committed=event.step + 1, phase=Phase.SCRIPT), Commit(event.step)]
        if self.order is None or event.number != self.order.number:
            return []
        match event:
            case StateFed(_, step):
                self._base = step
            case StepFed(_, step, compared):
                self._steps.add(step)
                self._is_compared |= compared
            case FedLoaded():
                self._is_loaded = True
                return [BecameFed(state=StateCopy.CURRENT, committed=self._base)]
        return []

    def follow(self, status: WorkerStatus) -> list[Outcome]:
        """Load or apply what was fed, once the script waits for it."""
        order, at_boundary = self.order, status.phase is Phase.BOUNDARY
        if order is None or self._taking >= 0:
            idle = self._is_stranded and status.phase is Phase.COMPUTING
            return [BecameFed(phase=Phase.WAITING)] if idle else []
        if not self._is_loaded:
            fresh = status.state is StateCopy.INITIAL and status.promised < order.view
            if self._base is None or not fresh or not at_boundary:
                return []  # who has promised may be taken into the next view as it then was
            return [BecameFed(state=StateCopy.DIRTY), LoadFed(order.number)]
        step = status.committed
        if step in self._steps:
            if at_boundary:
                return [BecameFed(phase=Phase.COMPUTING), Begin(step)]
            if self.opened != step or status.phase is Phase.SCRIPT:
                return []
            self._taking = step
            return [TakeFed(step)]
        if self.opened == step and status.phase is Phase.COMPUTING:
            return [BecameFed(phase=Phase.WAITING)]
        compared = self._is_compared or not self._compares
        if at_boundary and compared and status.abreast < order.number:
            return [BecameFed(abreast=order.number)]
        return []
