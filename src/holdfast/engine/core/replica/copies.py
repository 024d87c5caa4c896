"""Decides when one worker's state is copied: for the store, for followers, into memory. Pure.

A copy is made at a boundary on which all members agree in their votes. It counts once they have
compared their states, in the next step.
"""

from __future__ import annotations

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.ground.vote import Tally
from holdfast.engine.core.invalidations import is_invalidated
from holdfast.engine.core.policies import ReplicationPolicy
from holdfast.engine.core.replica.feeding import Feeding
from holdfast.engine.core.replica.intervals import Exposure
from holdfast.engine.core.replica.replicating import Replicating
from holdfast.engine.core.replica.saves import SavedUpTo, SavePolicy, Saves
from holdfast.engine.core.views import View

# A worker without room for its ledger takes up to this number of steps; their lines stay in memory.
STEPS_MAX = 16


class RoomWait:
    """Decides where a worker rests whose ledger cannot grow, because the file system is full.

    It takes a few more steps if its state can then be saved: the members of a view agree on a
    checkpoint in the votes of a step.
    """

    def __init__(self, standing: Standing, saves: Saves) -> None:
        self.is_held = False  # it rests at a boundary only because it lacks room
        self._standing = standing
        self._saves = saves
        self._since = 0  # the step at which it lacked room first

    def see(self, *, has_room: bool) -> None:
        """Record whether the ledger can grow; if it cannot, the state is to be saved."""
        if not has_room:
            self._since = self._standing.status.committed
            self._saves.want_now()
        self._standing.change(no_room=not has_room)
        self._standing.tell()

    def holds(self) -> bool:
        """Return whether the worker has to rest instead of beginning its next step."""
        status = self._standing.status
        goes_on = self._saves.can_save and status.committed < self._since + STEPS_MAX
        self.is_held = status.no_room and not goes_on
        if self.is_held:
            self._standing.tell()
        return self.is_held

    def makes_way(self) -> bool:
        """Return whether to leave the view at once for a planned change: no step will end it.

        A change that needs the last state saved has to wait for room.
        """
        standing = self._standing
        return self.is_held and standing.is_change_pending and not standing.pending_save

    def close(self) -> None:
        """Forget that a view held the worker: the view is over."""
        self.is_held = False


class Copies:
    """Decides which copy of one worker's state is made next, and counts the copies."""

    def __init__(
        self, standing: Standing, saves: SavePolicy, replication: ReplicationPolicy | None
    ) -> None:
        self._standing = standing
        self._exposure = Exposure(replication)
        self.saves = Saves(saves, standing.me, self._exposure)
        self.room = RoomWait(standing, self.saves)
        self.feeding = Feeding()
        self.replicating = Replicating(self._exposure)

    def enter(self, view: View) -> None:
        """Begin a view that was just installed."""
        committed = self._standing.status.committed
        self._standing.carry(self.feeding.enter(view))
        self._exposure.enter(view)
        self.saves.enter(view, self._standing.now)
        self.saves.drop_unconfirmed(committed)
        self.replicating.enter(view)
        self._count_checkpoints(self.saves.count_compared(committed))

    def looks_at_all(self, step: int) -> bool:
        """Return whether the whole state after `step` steps is compared, because it is copied."""
        agreed = self.saves.agreed
        is_saved = agreed is not None and agreed.after == step
        return is_saved or self.replicating.looks_at_all(step)

    def record_step(self) -> None:
        """Record that this member votes on a step."""
        self._exposure.record_step(self._standing.now)

    def agree(self, step: int, view: View, tally: Tally) -> None:
        """Take in what all members have voted on the copies of the state, with `step`."""
        if tally.save:
            self.saves.agree(step + 1, view, tally.save)
        self.replicating.record_votes(step, tally, self._standing.now)
        self._standing.carry(self.feeding.handle_commit(step))
        self.feeding.agree(tally.follow, step + 1)

    def postpone(self, step: int) -> None:
        """Record that the script did not rest after `step` steps: copy at the next boundary."""
        self.saves.postpone(step)
        self.replicating.postpone(step)

    def copy_next(self, done: SinkKind | None, *, within: bool) -> bool:
        """Order the next copy of the state that is due at this boundary; return whether one is.

        They are made for the store, for followers and for the nodes' memory, in this order.
        `done`: the copy made last. `within`: the boundary lies between two steps of one loop.
        """
        if done is SinkKind.MEMORY:
            return False
        view, standing = self._standing.view, self._standing
        step, acts = standing.status.committed, standing.acts
        found: list[ef.Outcome] = []
        if done is None and within:
            found = self.saves.next_copy(step)
            if self.saves.ending:
                standing.change(saving=self.saves.ending)
        if not found and acts and view is not None and done in (None, SinkKind.STORE):
            found = self.feeding.next_copy(step, view, within=within)
        if not found and acts and within:
            found = self.replicating.next_copy(step, standing.now)
        standing.carry(found)
        return bool(found)

    def record_copy(self, event: ev.StateCopied) -> None:
        """Record that the state was copied to be saved or replicated, or why not."""
        now = self._standing.now
        if event.sink is SinkKind.MEMORY:
            self.replicating.record_pause(now, event.stall_s)
        if event.sink is SinkKind.STORE:
            copied = self.saves.record_copy(event.step, now, event.stall_s, event.problem)
            self._standing.carry(copied)
            if self._standing.status.saving:
                self._standing.change(saving=self.saves.ending)

    def record_replication(self, event: ev.StateProtected) -> None:
        """Record that this worker's pieces of a state are in memory, or why not."""
        standing = self._standing
        standing.carry(self.replicating.record_copy(event.step, event.problem))

    def record_save_end(self, event: ev.SaveEnded) -> None:
        """Record the end of a save, as the writer reports it."""
        standing = self._standing
        self._count_checkpoints(self.saves.record_end(event, standing.status.committed))
        if standing.status.saving != self.saves.ending:
            standing.change(saving=self.saves.ending)
            standing.tell()

    def finish_loop(self) -> None:
        """Count checkpoints that no further step compares."""
        self._count_checkpoints(self.saves.finish_loop(self._standing.status.committed))

    def record_commit(self, step: int) -> None:
        """Count checkpoints that all members have compared, and drop older replicated states."""
        self._count_checkpoints(self.saves.count_compared(step + 1))
        self._standing.carry(self.replicating.forget_older())

    def _count_checkpoints(self, outcomes: list[ef.Outcome | SavedUpTo] | list[SavedUpTo]) -> None:
        standing = self._standing
        for outcome in outcomes:
            if isinstance(outcome, SavedUpTo):
                known = standing.status.invalidations
                if not is_invalidated(known, outcome.step, outcome.view):
                    standing.change(saved=outcome.step)
                standing.tell()
            else:
                standing.carry([outcome])
