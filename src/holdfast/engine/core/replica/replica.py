"""Decides how a worker obtains the state of the job, and how it shares its own copy.

A state is a base and the reduced gradients since. A worker that lacks either gets it from a
source: a checkpoint, the nodes' memory, donors, steps that members kept for it, or members that
feed it while they train. It gives copies to sinks: the store, the nodes' memory, workers that
follow, members that come back. It does not know membership; the worker machine names the
view that began.
"""

from __future__ import annotations

import enum

from holdfast.engine.core.errors import require
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import FIRST, SinkKind, SourceKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.invalidations import is_invalidated
from holdfast.engine.core.policies import ReplicationPolicy
from holdfast.engine.core.replica.feeding import FedEvent, Feeding, Following
from holdfast.engine.core.replica.intervals import Exposure
from holdfast.engine.core.replica.replicating import Replicating
from holdfast.engine.core.replica.saves import SavedUpTo, SavePolicy, Saves
from holdfast.engine.core.transitions import Transitions
from holdfast.engine.core.views import FollowOrder, View
from holdfast.engine.core.worker_status import Phase, ReplicaStage

# A worker without room for its ledger takes up to this number of steps; their lines stay in memory.
STEPS_MAX = 16


class SyncStage(enum.Enum):
    """Names how far this member is on the way to the state that all members of its view hold.

    The words are those for the stages of a replica (docs/glossary.md).
    """

    #: There is no view, or the view was given up.
    CLOSED = "closed"
    CONNECTING = "connecting"
    #: All members load a base together.
    OBTAINING = "obtaining"
    #: This member applies the steps that it has missed.
    CATCHING_UP = "catching up"
    #: Joiners receive the state, and all members compare theirs.
    COMPARING = "comparing"
    CURRENT = "current"


SYNC_MOVES = Transitions(
    {
        SyncStage.CLOSED: (SyncStage.CONNECTING,),
        SyncStage.CONNECTING: (
            *(SyncStage.OBTAINING, SyncStage.CATCHING_UP, SyncStage.COMPARING, SyncStage.CURRENT),
        ),
        SyncStage.OBTAINING: (SyncStage.CATCHING_UP, SyncStage.COMPARING),
        SyncStage.CATCHING_UP: (SyncStage.COMPARING, SyncStage.CURRENT),
        SyncStage.COMPARING: (SyncStage.CURRENT,),
        SyncStage.CURRENT: (SyncStage.CATCHING_UP,),  # a fed member that lacks the last steps
    },
    always=SyncStage.CLOSED,  # a view can be given up at any time
)


class StoreWait:
    """Decides how long to wait for a store that does not answer, up to `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def record_answer(self) -> None:
        """Record that the store has answered."""
        self._since = None

    def record_silence(self, reason: str, now: float) -> list[ef.Outcome]:
        """Record that it is silent: the next view asks it again, until the time is over."""
        told: list[ef.Outcome] = []
        if self._since is None:
            self._since = now
            told.append(ev.EventNoted("store", f"{reason}; it is asked again"))
        waited_s = now - self._since
        if waited_s >= self._patience_s:
            text = f"{reason}: given up after {waited_s:.0f} s; go on with `holdfast resume` once"
            told.append(ef.GiveUp(f"{text} the store answers"))
        return told


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


class Replica:
    """Decides for the replica of one worker, as the module describes.

    `keeps`: there are checkpoints to go back to. `compares`: members compare their states.
    `restore_s`: how long a store may stay silent when the job is to begin from a checkpoint.
    """

    def __init__(
        self,
        standing: Standing,
        saves: SavePolicy,
        *,
        keeps: bool = False,
        compares: bool = False,
        restore_s: float = 300.0,
        replication: ReplicationPolicy | None = None,
    ) -> None:
        self._exposure = Exposure(replication)
        self.saves = Saves(saves, standing.me, self._exposure)
        self.room = RoomWait(standing, self.saves)
        self.feeding = Feeding()
        self.replicating = Replicating(self._exposure)
        self._stage = SyncStage.CLOSED
        self._is_receiving = False  # a missed step is on its way
        self._standing = standing
        self._keeps_checkpoints = keeps
        self._following = Following(standing, compares=compares)
        self._store = StoreWait(restore_s)
        self._opened = -1  # the newest step that was opened in this loop
        self._withdrawn: object = ()  # the invalidations that were passed to the store last

    @property
    def stage(self) -> SyncStage:
        """Return the stage of this member on its way to the state of its view."""
        return self._stage

    def _go_to(self, stage: SyncStage) -> None:
        self._stage, self._is_receiving = SYNC_MOVES.check(self._stage, stage), False

    def check(self) -> None:
        """Assert the invariants between two events."""
        closed = self._stage is SyncStage.CLOSED
        require(closed is not self._standing.acts, f"acts while {self._stage.value}")

    # ------------------------------------------------------------ views

    def enter(self, view: View) -> None:
        """Begin a view that was just installed."""
        self._go_to(SyncStage.CONNECTING)
        committed = self._standing.status.committed
        self._standing.carry(self.feeding.enter(view))
        self._exposure.enter(view)
        self.saves.enter(view, self._standing.now)
        self.saves.drop_unconfirmed(committed)
        self.replicating.enter(view)
        self._count_checkpoints(self.saves.count_compared(committed))

    def close(self) -> None:
        """Give the view up."""
        self._go_to(SyncStage.CLOSED)
        self.room.close()

    def begin_sync(self) -> bool:
        """Begin to bring all members to one state; return whether they hold it already."""
        view, standing = self._view(), self._standing
        is_first = view.rank(standing.me) == FIRST
        if self._keeps_checkpoints and is_first and view.invalidations != self._withdrawn:
            self._withdrawn = view.invalidations
            standing.order(ef.Withdraw(view.invalidations))
        if not view.joiners or view.fed:
            self._go_to(SyncStage.CURRENT)
            return True
        if not view.donors and view.base:
            self._go_to(SyncStage.OBTAINING)
            recalls = view.recall is not None and view.recall.view
            source = SourceKind.MEMORY if recalls else SourceKind.STORE
            standing.order(ef.ObtainState(source, view.number, view.base))
        else:
            self._continue_from_base()
        return False

    def record_restore(self) -> None:
        """Continue from the base that was loaded."""
        self._store.record_answer()
        self._continue_from_base()

    def _continue_from_base(self) -> None:
        """Apply the steps that are missing, or compare the states of all members."""
        view, standing = self._view(), self._standing
        if view.late_worker(standing.me) is not None:
            self._go_to(SyncStage.CATCHING_UP)
            if view.recall is not None:
                standing.change(committed=view.base)
                if self.is_behind(view):
                    self.begin()
                else:
                    self.catch_up()
            return
        if standing.me not in view.joiners:
            standing.order(*(ef.SendMissed(view.number, lag) for lag in view.catching_up))
        self._compare(view)

    def catch_up(self) -> bool:
        """Apply the next missed step once the script waits for it.

        Returns whether a worker that joined by a feed has now applied all of it.
        """
        if self.stage is not SyncStage.CATCHING_UP or self._is_receiving:
            return False
        view, standing = self._view(), self._standing
        status = standing.status
        if view.feeds(standing.me):
            if status.committed < view.resume_step:
                return False
            self._go_to(SyncStage.CURRENT)
            return True
        waits = self._opened == status.committed and status.waiting
        if status.committed < view.resume_step:
            if waits:
                self._is_receiving = True
                source = SourceKind.MEMBERS if view.recall is None else SourceKind.MEMORY
                standing.order(ef.ObtainStep(source, view.number, status.committed))
        # Recalled steps may end where the script has no boundary: none of the next is done.
        elif standing.rests or (view.recall is not None and waits):
            self._compare(view)
        return False

    def commit_missed(self, step: int) -> bool:
        """Commit a missed step, whose gradient is here; return whether it was the next one."""
        if step != self._standing.status.committed:
            return False
        self._is_receiving = False
        self._standing.change(committed=step + 1, phase=Phase.SCRIPT)
        self._standing.order(ef.Commit(step))
        return True

    def record_comparison(self) -> bool:
        """Record that all states were compared; return whether that was still awaited."""
        if self.stage is not SyncStage.COMPARING:
            return False
        self._go_to(SyncStage.CURRENT)
        return True

    def awaits_fed_steps(self) -> bool:
        """Return whether this member, which joined by a feed, lacks steps; then wait for them."""
        view, status = self._view(), self._standing.status
        if not view.feeds(self._standing.me) or status.committed >= view.resume_step:
            return False
        self._go_to(SyncStage.CATCHING_UP)
        return True

    def record_sync(self, view: View) -> None:
        """Take note that all members hold the state: this one does, however it came by it."""
        standing = self._standing
        self._following.end_as_member()
        if not standing.status.has_state:
            standing.change(
                state=ReplicaStage.CURRENT,
                committed=view.resume_step,
                hosted=view.hosted_by(standing.me),
            )

    def is_behind(self, view: View) -> bool:
        """Return whether this member has yet to apply steps that it has missed."""
        late = view.late_worker(self._standing.me) is not None
        catching_up = self.stage is SyncStage.CATCHING_UP
        based = view.recall is None or catching_up
        return late and based and self._standing.status.committed < view.resume_step

    def _compare(self, view: View) -> None:
        self._go_to(SyncStage.COMPARING)
        self._standing.order(ef.SyncState(view.number))

    def _view(self) -> View:
        view = self._standing.view
        assert view is not None, "a replica is brought up to date in a view"
        return view

    # ------------------------------------------------------------ the script

    def enter_loop(self) -> None:
        """Begin another loop of the script."""
        self._opened = -1
        self.saves.enter_loop()

    def record_opened(self, step: int) -> None:
        """Record that the script is ready to compute a step."""
        self._opened = self._following.opened = step

    def record_step(self) -> None:
        """Record that this member votes on a step."""
        self._exposure.record_step(self._standing.now)

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

    def is_within_loop(self) -> bool:
        """Return whether the boundary at which the script rests follows a step of this loop.

        What a script does between two loops it would do again to a state that is copied there.
        """
        return self._opened == self._standing.status.committed - 1

    def begin(self) -> None:
        """Order the script to leave its boundary, if it is at one, and to open the next step."""
        standing = self._standing
        if standing.status.phase is not Phase.BOUNDARY or self.room.holds():
            return
        standing.change(phase=Phase.COMPUTING)
        step, agreed, view = standing.status.committed, self.saves.agreed, standing.view
        whole = agreed is not None and agreed.after == step
        whole = whole or self.replicating.looks_at_all(step)
        joined = view is not None and bool(view.joiners) and step == view.resume_step
        standing.order(ef.Begin(step, whole, joined))

    # ------------------------------------------------------------ sources

    @property
    def is_fed(self) -> bool:
        """Return whether members feed this worker, as far as it knows."""
        return self._following.order is not None

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
        """Take the present order to feed workers: this one may feed or be fed."""
        self._standing.carry(self.feeding.take_order(order, self._standing.view))
        if not self.joins_fed:
            self._following.heed(order)

    def hear_fed(self, event: FedEvent) -> bool:
        """Take in a message of members that feed this worker; return whether a step was applied."""
        return self._following.hear(event)

    def follow(self) -> bool:
        """Load or apply the next part of the feed; return whether there was one."""
        return self._following.follow()

    def leave_feed(self) -> None:
        """Forget the feed: this worker enters a view in another way."""
        self._following.end()

    def record_feed_failure(self, number: int, reason: str) -> bool:
        """Record that an order cannot be carried out; return whether this worker follows it."""
        standing = self._standing
        self.feeding.record_failure(number)
        standing.change(unfed=max(standing.status.unfed, number))
        standing.note("join", f"workers are not fed while others train: {reason}")
        order = self._following.order
        return order is not None and order.number == number

    def record_obtain_failure(self, event: ev.ObtainFailed) -> None:
        """Record that the base, or a step since, cannot be had from a source."""
        standing = self._standing
        if event.damaged is not None:
            standing.change(
                unreadable=event.damaged, saved=event.instead, state=ReplicaStage.OBTAINING
            )
            if event.reason:
                standing.note("rot", event.reason)
        elif event.source is SourceKind.MEMORY:
            standing.change(unrecalled=event.view)
            standing.note("memory", event.reason)
        else:
            standing.carry(self._store.record_silence(event.reason, standing.now))

    def record_loading(self) -> None:
        """Record that the driver begins to overwrite the script's state."""
        if not self._standing.status.has_state:
            self._standing.change(state=ReplicaStage.OBTAINING)

    # ------------------------------------------------------------ sinks

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
        if self.room.is_held:
            self.begin()

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
