"""Decides for one incarnation of a worker.

It does not know tensors, sockets, threads or time. Its driver feeds it what happened and carries
out the effects in order. Three machines decide: `membership` about views and promises, `replica`
about the state that this worker holds, obtains and gives away, `step` about what happens between
two step boundaries. This module hands each event to the machine that it concerns, and each
verdict of the step machine to the other two.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.errors import assert_never, require
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.effects import WorkerEffect
from holdfast.engine.core.ground.events import SinkKind, SourceKind, WorkerEvent
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.replica.replica import Replica, SyncStage
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speculation import Lateness
from holdfast.engine.core.step.step_machine import StepMachine
from holdfast.engine.core.step.step_policy import Counting, StepPolicy
from holdfast.engine.core.step.verdicts import Agreed, Decided, Doubted, Failed, Verdict
from holdfast.engine.core.types import NO_VIEW, Incarnation, Tick, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker.boundary import Boundary
from holdfast.engine.core.worker.membership import Membership
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage, WorkerStatus

ReplicaEvent = (
    ev.StateCopied
    | ev.StateProtected
    | ev.SaveEnded
    | ev.Loading
    | ev.StateFed
    | ev.StepFed
    | ev.FollowerBehind
    | ev.Reachable
)


class WorkerMachine:
    """Decides for one worker, as the module describes; `handle` is the only mutator."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        policy: StepPolicy | None = None,
        counting: Callable[[View, BalancePolicy | None], Counting] = Counting,
    ) -> None:
        policy = policy or StepPolicy()
        self._standing = Standing(worker, incarnation)
        standing = self._standing
        self._copies = Copies(standing, policy.saves, policy.replication)
        self._following = Following(standing, compares=policy.cycle > 0)
        self._replica = Replica(
            standing,
            self._copies,
            self._following,
            keeps=policy.keeps,
            restore_s=policy.restore_s,
        )
        self.step = StepMachine(standing, policy, self._copies, self._following, counting)
        self._membership = Membership(standing, self._replica, self._following, self.step)
        self._boundary = Boundary(
            standing, self._replica, self._copies, self._following, self._membership, self.step
        )

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:
        """Apply one event at time `now` (seconds, any fixed origin); returns effects in order."""
        self._standing.now = now
        self._respond(event)
        return self._standing.take_effects()

    def deadline(self) -> float | None:
        """Return the next time at which it wants a Tick; None while it does not act."""
        if not self._standing.acts:
            return None
        step = self.step
        late_at = step.watch.late_at(counts=step.tasks.is_timed)
        look_at = step.watch.look_at(counts=step.tasks.is_timed, synced=step.course.is_synced)
        return min(self._standing.acting_until, late_at, look_at)

    def snapshot(self) -> WorkerStatus:
        """Return the status for the control plane."""
        return self._standing.status

    @property
    def view(self) -> View | None:
        """Return the newest view installed."""
        return self._standing.view

    @property
    def lateness(self) -> Lateness:
        """Return the statistics of steps and of waits for other members."""
        return self.step.watch.lateness

    @property
    def acting_until(self) -> float:
        """Return when its right to act ends, by its node's clock."""
        return self._standing.acting_until

    @property
    def pending(self) -> bool:
        """Return whether it knows of a planned change of the view, as its votes announce."""
        return self._standing.is_change_pending

    def leads(self, now: float) -> bool:
        """Return whether this worker acts for the job."""
        return self._standing.leads(now)

    def check(self) -> None:
        """Assert every invariant."""
        status, view = self._standing.status, self._standing.view
        number = view.number if view else NO_VIEW
        require(status.view == number, f"status shows view {status.view}, installed is {number}")
        require(not status.reduced or status.has_state, "a gradient without a state")
        steps = self._standing.acts and self.step.course.is_synced
        require(not steps or status.has_state, "steps without a state")
        is_brought_up = self._replica.stage is SyncStage.CURRENT
        require(not steps or is_brought_up, f"steps while {self._replica.stage.value}")
        self._replica.check()
        self.step.course.check(has_sums=self.step.judging.sums is not None)

    # ------------------------------------------------------------ events

    def _respond(self, event: WorkerEvent) -> None:
        standing, membership = self._standing, self._membership
        match event:
            case ev.LoopEntered(exact):
                standing.is_exact = exact
                self._replica.enter_loop()
                loop = standing.status.loop + 1
                standing.change(stage=Stage.READY, loop=loop, opened=0, phase=Phase.SCRIPT)
                standing.tell()
            case ev.AtBoundary():
                self._boundary.copy_next(None, within=self._boundary.is_within_loop())
            case ev.RoomSeen(has_room):
                self._copies.room.see(has_room=has_room)
                if self._copies.room.is_held:
                    self._replica.begin()
            case ev.LoopFinishing() | ev.LoopEnded():
                self._handle_loop_end(event)
            case ev.StepOpened():
                self._handle_step_opened(event)
            case ev.TaskDone():
                self.step.handle_task(event)
                self._boundary.catch_up()
            case ev.StateLost():
                membership.lose_state()
            case ev.Directed(directive):
                self._handle_directive(directive)
            case ev.EventNoted(kind, text, about):
                standing.note(kind, text, about)
            case ev.HeirsSeen(addresses, layout):
                standing.change(heirs=addresses, layout=layout)
                standing.tell()
            case ev.GroupBroken():
                membership.handle_broken_group(event)
            case ev.LinkLost(view, peers):
                membership.handle_lost_link(view, peers)
            case Tick():
                self._look_at_clock()
            case _ if isinstance(event, ReplicaEvent):
                self._handle_replica(event)
            case _ if isinstance(event, ev.Obtained):
                self._handle_obtained(event)
            case _ if standing.acts_in(event.view):
                self._handle_group(event)

    def _handle_loop_end(self, event: ev.LoopFinishing | ev.LoopEnded) -> None:
        is_over = isinstance(event, ev.LoopEnded)
        self._standing.change(phase=Phase.ENDED if is_over else Phase.LEAVING, line=event.line)
        self._standing.tell()
        if is_over:
            self._membership.release()
        else:
            self._copies.finish_loop()
        self._boundary.catch_up()

    def _handle_step_opened(self, event: ev.StepOpened) -> None:
        standing = self._standing
        phase = standing.status.phase if event.rested else Phase.COMPUTING
        standing.change(opened=event.step + 1, line=event.line, phase=phase)
        self._replica.record_opened(event.step)
        self.step.handle_opened(event)
        self._boundary.catch_up()
        self._boundary.follow()

    def _handle_replica(self, event: ReplicaEvent) -> None:
        replica = self._replica
        match event:
            case ev.StateCopied(sink, _, _, problem):
                self._copies.record_copy(event)
                if sink is SinkKind.FOLLOWERS and problem:
                    self._boundary.fail_feed(event.order, problem)
                self._boundary.copy_next(sink, within=True)
            case ev.Reachable(address):
                self._standing.change(address=address)
            case ev.StateProtected():
                self._copies.record_replication(event)
            case ev.SaveEnded():
                self._copies.record_save_end(event)
                if self._copies.room.is_held:
                    replica.begin()
            case ev.Loading():
                # The driver begins to overwrite the script's state.
                if not self._standing.status.has_state:
                    self._standing.change(state=ReplicaStage.OBTAINING)
            case ev.FollowerBehind():
                self._standing.carry(self._copies.feeding.fall_behind(event))
            case ev.StateFed() | ev.StepFed():
                self._following.hear(event)
                self._boundary.follow()
            case _:
                assert_never(event)

    def _handle_obtained(self, event: ev.Obtained) -> None:
        """Continue with the state or step that a source has given, or has failed to give."""
        if event.source is SourceKind.FEED:
            self._boundary.handle_fed(event)
            return
        step, replica = self.step, self._replica
        acts = self._standing.acts_in(event.view)
        match event:
            case ev.StateObtained() if acts:
                replica.record_restore()
            case ev.StepObtained(_, _, missed) if acts:
                if replica.commit_missed(missed):
                    step.record_commit(step.course.owners)
            case ev.ObtainFailed(damaged=damaged) if acts or damaged is not None:
                replica.record_obtain_failure(event)
                why = f"cannot get the state ({event.reason})"
                if not self._membership.promise(event.view, why) and damaged is not None:
                    self._standing.tell()

    def _handle_group(self, event: ev.GroupEvent) -> None:
        """Handle an event of the present view."""
        step, replica = self.step, self._replica
        match event:
            case ev.Connected():
                if replica.begin_sync():
                    step.agree()
                self._boundary.catch_up()
            case ev.StepKept(_, kept, full):
                step.handle_kept_gradient(kept, full=full)
            case ev.StatesCompared(_, prints):
                if replica.record_comparison():
                    step.judging.judge_states(dict(prints)) if prints else step.agree()
            case ev.Gathered():
                self._conclude(step.handle_gathered(event))
            case ev.Summed():
                step.handle_sums(event)
            case ev.SumChecked():
                step.handle_sum_check(event)
            case ev.MemberDone() | ev.CountSettled():
                step.handle_counted(event)
            case ev.StillAwaited():
                step.tasks.copy_late(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ what members have concluded

    def _conclude(self, verdict: Verdict | None) -> None:
        match verdict:
            case Agreed():
                if not self._replica.awaits_fed_steps():
                    self._boundary.begin_steps()
            case Decided():
                self._commit_step(verdict)
            case Doubted():
                self._membership.doubt(verdict)
            case Failed(reason):
                self._membership.promise(self._standing.status.view, f"cannot go on ({reason})")
            case None:
                pass

    def _commit_step(self, vote: Decided) -> None:
        """Commit a step, if this worker may still act."""
        standing, step = self._standing, self.step
        status = standing.status
        if vote.step != status.committed or self._membership.is_fenced():
            return
        require(status.reduced, f"step {vote.step} was voted on without its gradient")
        if vote.pending:
            self._membership.announce_end()
        tasks, hosted = len(status.hosted), status.hosted
        if vote.owners != step.course.owners:
            hosted = tuple(v for v, owner in enumerate(vote.owners) if owner == status.worker)
        # All other members needed this worker's share of the step, which it sent after this moment.
        proved_at = step.watch.lateness.began_at
        step.watch.lateness.record_step(standing.now, tasks, timed=step.tasks.is_timed)
        standing.change(
            committed=vote.step + 1,
            reduced=False,
            hosted=hosted,
            phase=Phase.COMPUTING if vote.dropped else Phase.SCRIPT,
            proved_at=proved_at,
        )
        step.record_commit(vote.owners)
        if status.unproven and step.is_proved:
            standing.change(unproven=False)
        if self._copies.replicating.is_active:
            standing.order(ef.MarkCommitted(status.view, vote.step))
        standing.order(ef.Commit(vote.step, voted=True))
        self._copies.record_commit(vote.step)

    # ------------------------------------------------------------ views

    def _handle_directive(self, directive: WorkerDirective) -> None:
        membership, replica = self._membership, self._replica
        membership.heed(directive)
        self._copies.saves.want(directive.save_wanted)
        view = directive.view
        if view is not None and membership.enter(view):
            if not view.joiners or replica.is_behind(view):
                replica.begin()
            self._boundary.follow()
        self._boundary.heed(directive.follow)
        if self._copies.room.makes_way():
            why = "waits for room, so the planned change comes at once"
            membership.promise(self._standing.status.view, why)
        self._look_at_clock()
        membership.release()

    def _look_at_clock(self) -> None:
        """Give the view up if the right to act has ended; else look for members that are late."""
        if self._standing.acts and not self._membership.is_fenced():
            step = self.step
            step.watch.look(counts=step.tasks.is_timed, synced=step.course.is_synced)
