"""Brings a worker's state forward at boundaries between steps: copies, missed steps, feeds. Pure.

At a boundary the script rests, so sinks can copy the state, and steps that this worker has missed
can be applied. Once all members hold the same state, steps begin.
"""

from __future__ import annotations

from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.replica.replica import Replica
from holdfast.engine.core.step.step_machine import StepMachine
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.views import FollowOrder
from holdfast.engine.core.worker.membership import Membership
from holdfast.engine.core.worker_status import Phase, ReplicaStage


class Boundary:
    """Decides what a worker does while its script rests."""

    def __init__(
        self,
        standing: Standing,
        replica: Replica,
        copies: Copies,
        following: Following,
        membership: Membership,
        step: StepMachine,
    ) -> None:
        self._standing = standing
        self._replica = replica
        self._copies = copies
        self._following = following
        self._membership = membership
        self._step = step

    def begin_steps(self) -> None:
        """Begin the steps of a view: all members hold the same state."""
        view = self._standing.view
        assert view is not None, "a group without a view"
        self._step.watch.lateness.record_built(self._standing.now)
        standing = self._standing
        self._following.end_as_member()
        if not standing.status.has_state:
            standing.change(
                state=ReplicaStage.CURRENT,
                committed=view.resume_step,
                hosted=view.hosted_by(standing.me),
            )
        standing.tell()
        self._replica.begin()
        self._step.begin_steps()

    def copy_next(self, done: SinkKind | None, *, within: bool) -> None:
        """Order the copy of the state for the next sink; continue once no copy is due."""
        if not self._copies.copy_next(done, within=within):
            self._end_copies()

    def _end_copies(self) -> None:
        standing, view = self._standing, self._standing.view
        standing.change(phase=Phase.BOUNDARY)
        if self._following.is_fed:
            self.follow()
        elif view is None:
            pass
        elif standing.status.promised >= view.number:
            standing.tell()
        elif self._ends_here(view.number):
            self._membership.promise_at_rest(view.number)
        elif view.joiners and not self._step.course.is_synced and not self._replica.is_behind(view):
            self.catch_up()
        else:
            self._replica.begin()

    def _ends_here(self, number: ViewNumber) -> bool:
        """Return whether a view ends at this boundary, as planned."""
        return self._membership.ends_at_boundary(number) or self._copies.saves.has_ended(number)

    def catch_up(self) -> None:
        """Apply the next missed step if the script waits for it; begin the steps after that."""
        if self._replica.catch_up():
            self.begin_steps()

    def follow(self) -> None:
        """Load or apply the next part of the feed; after the last one, continue as a member."""
        if not self._following.follow() and self._following.joins_fed:
            self.catch_up()

    def fail_feed(self, number: int, reason: str) -> None:
        """Record that an order to feed failed here; a worker that depends on it leaves."""
        standing, order = self._standing, self._following.order
        self._copies.feeding.record_failure(number)
        standing.change(unfed=max(standing.status.unfed, number))
        standing.note("join", f"workers are not fed while others train: {reason}")
        if order is None or order.number != number:
            return
        if self._following.joins_fed:
            why = f"was not fed until it could join ({reason})"
            self._membership.promise(standing.status.view, why)
        self._following.end()
        standing.tell()

    def heed(self, order: FollowOrder | None) -> None:
        """Take the present order to feed workers: this one may feed or be fed."""
        self._standing.carry(self._copies.feeding.take_order(order, self._standing.view))
        if not self._following.joins_fed:
            self._following.heed(order)

    def is_within_loop(self) -> bool:
        """Return whether the boundary at which the script rests follows a step of this loop.

        What a script does between two loops it would do again to a state that is copied there.
        """
        return self._replica.opened == self._standing.status.committed - 1

    def handle_fed(self, event: ev.Obtained) -> None:
        """Continue with a part of the feed, or without, as the source has answered."""
        if isinstance(event, ev.ObtainFailed):
            self.fail_feed(event.order, event.reason)
            return
        if self._following.hear(event) and self._following.joins_fed:
            self._step.record_commit(self._step.course.owners)
        self.follow()
