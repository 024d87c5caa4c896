"""Decides how a worker obtains the state of the job.

A state is a base and the reduced gradients since. A worker that lacks either gets it from a
source: a checkpoint, the nodes' memory, donors, steps that members kept for it, or members that
feed it while they train. Its own copies go to sinks (copies.py). It does not know membership; the
worker machine names the view that began.
"""

from __future__ import annotations

import enum

from holdfast.engine.core.errors import require
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import FIRST, SourceKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.ground.transitions import Transitions
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, ReplicaStage


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


class Replica:
    """Decides for the replica of one worker, as the module describes.

    `keeps`: there are checkpoints to go back to. `restore_s`: how long a store may stay silent when
    the job is to begin from a checkpoint.
    """

    def __init__(
        self,
        standing: Standing,
        copies: Copies,
        following: Following,
        *,
        keeps: bool = False,
        restore_s: float = 300.0,
    ) -> None:
        self._copies = copies
        self._following = following
        self._stage = SyncStage.CLOSED
        self._is_receiving = False  # a missed step is on its way
        self._standing = standing
        self._keeps_checkpoints = keeps
        self._store = StoreWait(restore_s)
        self.opened = -1  # the newest step that was opened in this loop
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
        self._copies.enter(view)

    def close(self) -> None:
        """Give the view up."""
        self._go_to(SyncStage.CLOSED)
        self._copies.room.close()

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
        waits = self.opened == status.committed and status.waiting
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
        self.opened = -1
        self._copies.saves.enter_loop()

    def record_opened(self, step: int) -> None:
        """Record that the script is ready to compute a step."""
        self.opened = self._following.opened = step

    def begin(self) -> None:
        """Order the script to leave its boundary, if it is at one, and to open the next step."""
        standing = self._standing
        if standing.status.phase is not Phase.BOUNDARY or self._copies.room.holds():
            return
        standing.change(phase=Phase.COMPUTING)
        step, view = standing.status.committed, standing.view
        whole = self._copies.looks_at_all(step)
        joined = view is not None and bool(view.joiners) and step == view.resume_step
        standing.order(ef.Begin(step, whole, joined))

    # ------------------------------------------------------------ sources

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
