"""Decides what one incarnation of a worker may do, and knows what it has promised.

It does not know tensors, sockets, threads or time. Its driver feeds it what happened and carries
out the effects in order. What happens between two step boundaries is decided by the step machine
inside. The invariant it keeps: once it has promised a view number, nothing that happens in that
view or an older one can change `committed` or `reduced`; only a newer view can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from holdfast.core.errors import assert_never, require
from holdfast.core.invalidations import Invalidations, is_covered, is_invalidated, merge
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.core.step.activities import Activity
from holdfast.core.step.balance import BalancePolicy
from holdfast.core.step.effects import Outcome, WorkerEffect
from holdfast.core.step.events import WorkerEvent
from holdfast.core.step.following import FedEvent, Following
from holdfast.core.step.speculation import Lateness
from holdfast.core.step.step_machine import StepMachine
from holdfast.core.step.step_policy import Counting, StepPolicy
from holdfast.core.step.store_wait import StoreWait
from holdfast.core.types import (
    NO_VIEW,
    FollowOrder,
    Incarnation,
    Invalidation,
    JobEvent,
    Phase,
    Stage,
    StateCopy,
    Tick,
    View,
    ViewNumber,
    WorkerDirective,
    WorkerId,
    WorkerStatus,
)

JOB_EVENTS_MAX = 8  # that a status carries
_FOREVER = float("inf")


class WorkerMachine:
    """Decides for one worker, as the module describes; `handle` is the only mutator."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        policy: StepPolicy | None = None,
        counting: Callable[[View, BalancePolicy | None], Counting] = Counting,
    ) -> None:
        self._policy = policy or StepPolicy()
        self.lateness = Lateness(self._policy.patience)
        self._step = StepMachine(worker, self._policy, self, counting)
        self._following = Following(compares=self._policy.cycle > 0)
        self._status = WorkerStatus(worker=worker, incarnation=incarnation)
        self._view: View | None = None
        self._last_step_of = NO_VIEW  # whose votes announced a change: it ends at the next boundary
        self._open_view = NO_VIEW  # promised at a boundary: its group is aborted with the next one
        self._looked_in = -1  # the step in which it looked for who is late
        self._pending_view = NO_VIEW
        self._opened = -1  # the newest step that was opened in this loop
        self._release_loop = 0
        self._released_loop = 0
        self._store = StoreWait(self._policy.restore_s)
        self._now = 0.0
        self.acting_until = _FOREVER  # by its node's clock

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:
        """Apply one event at time `now` (seconds, any fixed origin); returns effects in order."""
        self._now = now
        return self._carry(self._respond(event))

    def deadline(self) -> float | None:
        """Return when its right to act ends, or others will be late; None while it does not act."""
        if not self._acting_in(self._status.view):
            return None
        return min(self.acting_until, self._late_at(), self._look_at())

    def snapshot(self) -> WorkerStatus:
        """Return all that the control plane is told of this worker."""
        return self._status

    @property
    def view(self) -> View | None:
        """Return the newest view installed."""
        return self._view

    @property
    def owners(self) -> tuple[WorkerId, ...]:
        """Return who hosts each virtual rank in the step to be committed next."""
        return self._step.owners

    @property
    def now(self) -> float:
        """Return the time of the event that is being handled."""
        return self._now

    @property
    def at_rest(self) -> bool:
        """Tell whether the script has applied all that is committed, and waits."""
        return self._status.phase in (Phase.BOUNDARY, Phase.ENDED)

    @property
    def pending(self) -> bool:
        """Tell whether it knows of a planned change of the view, as it says in its votes."""
        return self._view is not None and self._pending_view >= self._view.number

    @property
    def leads_now(self) -> bool:
        """Tell whether it leads at the time of the event that is being handled."""
        return self.leads(self._now)

    def leads(self, now: float) -> bool:
        """Tell whether this worker is the one that acts for the job."""
        view = self._view
        return (
            view is not None
            and view.leader == self._status.worker
            and view.number > self._status.promised
            and now < self.acting_until
        )

    def check(self) -> None:
        """Assert every invariant."""
        status = self._status
        number = self._view.number if self._view else NO_VIEW
        require(status.view == number, f"status shows view {status.view}, installed is {number}")
        require(not status.reduced or status.has_state, "a gradient without a state")
        acting = self._acting_in(number) and self._step.is_synced
        require(not acting or status.has_state, "steps without a state")

    # ------------------------------------------------------------ events

    def _respond(self, event: WorkerEvent) -> Sequence[Outcome]:
        match event:
            case ev.LoopEntered() | ev.AtBoundary() | ev.ShareCopied() | ev.LoopFinishing():
                return self._script_said(event)
            case ev.Staged(number, problem):
                failed = self._feed_failed(number, problem) if problem else []
                return [*failed, *self._copies(2, within=True)]
            case ev.ProtectionBegun():
                return self._at_boundary()
            case ev.StateProtected(step, problem):
                return self._carry(self._step.protecting.copied(step, problem, self._now))
            case ev.Reachable(address):
                return self._change(address=address)
            case ev.StateFed() | ev.FedLoaded() | ev.StepFed() | ev.FedTaken():
                return self._fed(event)
            case ev.FeedFailed(number, reason):
                return self._feed_failed(number, reason)
            case ev.StepOpened():
                return self._step_opened(event)
            case ev.TaskDone():
                if event.purpose is ev.Purpose.SPECULATIVE:
                    self.lateness.copy_done()
                return self._step.task_done(event)
            case ev.LoopEnded():
                self._change(phase=Phase.ENDED)
                return [self._tell(), *self._release(), *self._step.catch_up()]
            case ev.Directed(directive):
                return self._directed(directive)
            case ev.SaveEnded():
                return self._step.saves.ended(event, self._status.committed)
            case ev.EventNoted(kind, text):
                return self._note_event(kind, text)
            case ev.GroupBroken(view):
                return self._promise(view) or self._close_group(view)
            case ev.LinkLost(view, peers):
                return self._link_lost(view, peers)
            case ev.Loading():
                return [] if self._status.has_state else self._change(state=StateCopy.DIRTY)
            case ev.Unreadable(view, step, other):
                self._change(unreadable=step, saved=other, state=StateCopy.DIRTY)
                told = self._note_event("rot", event.reason) if event.reason else []
                return [*told, *(self._promise(view) or [self._tell()])]
            case Tick():
                return self._expire()
            case _:
                return self._group_said(event) if self._acting_in(event.view) else []

    def _script_said(
        self, event: ev.LoopEntered | ev.AtBoundary | ev.ShareCopied | ev.LoopFinishing
    ) -> Sequence[Outcome]:
        saves = self._step.saves
        match event:
            case ev.LoopEntered():
                self._opened = -1
                saves.loop_entered()
                loop = self._status.loop + 1
                self._change(stage=Stage.READY, loop=loop, phase=Phase.SCRIPT)
                return [self._tell()]
            case ev.AtBoundary():
                # What a script does between two loops it would do again to a state saved there.
                within = self._opened == self._status.committed - 1
                return self._copies(0, within=within)
            case ev.ShareCopied(step, stall_s, problem):
                told = self._carry(saves.copied(step, self._now, stall_s, problem))
                return [*told, *self._copies(1, within=True)]
            case ev.LoopFinishing():
                return saves.finishing(self._status.committed)

    def _step_opened(self, event: ev.StepOpened) -> Sequence[Outcome]:
        self._opened = event.step
        if not event.rested:
            self._change(phase=Phase.COMPUTING)
        self._following.opened = event.step
        return [*self._step.opened(event), *self._step.catch_up(), *self._follow()]

    def _group_said(self, event: ev.GroupEvent) -> Sequence[Outcome]:  # noqa: RET503
        """Handle an event of the view in which it acts."""
        step = self._step
        match event:
            case ev.Connected():
                return [*step.connected(), *step.catch_up()]
            case ev.Restored():
                self._store.answered()
                return step.restored()
            case ev.StoreSilent(view, reason):
                told = self._carry(self._store.silent(reason, self._now))
                return [*told, *self._promise(view)]
            case ev.RecallFailed(view, reason):
                self._change(unrecalled=view)
                return [*self._note_event("memory", reason), *self._promise(view)]
            case ev.GradientKept(_, kept, full):
                return step.gradient_kept(kept, full=full)
            case ev.MissedHeard(_, missed):
                return self._caught_up(missed)
            case ev.StatesCompared():
                return step.compared(event)
            case ev.Gathered():
                return step.gathered(event)
            case ev.Summed():
                return step.summed(event)
            case ev.SumChecked():
                return step.sum_checked(event)
            case ev.MemberDone():
                return step.member_done(event)
            case ev.CountSettled():
                return step.count_settled(event)
            case ev.StillAwaited():
                return step.awaited(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ what the step has decided

    def _carry(self, outcomes: Sequence[Outcome]) -> list[WorkerEffect]:
        """Put what decisions come to in their place; effects stay as they are."""
        effects: list[WorkerEffect] = []
        for outcome in outcomes:
            match outcome:
                case ef.BecameBased(step):
                    self._change(committed=step)
                    behind = self._view is not None and self._catches_up(self._view)
                    effects += self._carry(self._begin() if behind else self._step.catch_up())
                case ef.BecameSynced():
                    effects += self._carry(self._group_synced())
                case ef.BecameReduced(reduced):
                    if reduced != self._status.reduced:
                        self._change(reduced=reduced)
                case ef.BecameIdle(idle):
                    effects += self._carry(self._idle(idle))
                case ef.BecameFed():
                    found = dataclasses.asdict(outcome)
                    self._change(**{k: v for k, v in found.items() if v is not None})
                    effects.append(self._tell())
                case ef.Decided():
                    effects += self._carry(self._decided(outcome))
                case ef.Doubted(invalidation, discarded):
                    effects += self._carry(self._doubted(invalidation, discarded))
                case ef.Failed():
                    effects += self._carry(self._promise(self._status.view))
                case ef.SavedUpTo(step, view):
                    if not is_invalidated(self._status.invalidations, step, view):
                        self._change(saved=step)
                    effects.append(self._tell())
                case ev.EventNoted(kind, text):
                    effects += self._note_event(kind, text)
                case _:
                    effects.append(outcome)
        return effects

    def _idle(self, idle: bool) -> Sequence[Outcome]:
        """Note that the script waits for others from now on, or has something to compute again."""
        self._change(phase=Phase.WAITING if idle else Phase.COMPUTING)
        self.lateness.done(self._now)
        self._looked_in = -1
        told = [] if self._acting_in(self._status.view) else [self._tell()]
        return [*told, *self._step.catch_up()]

    def _group_synced(self) -> Sequence[Outcome]:
        view = self._view
        assert view is not None, "a group without a view"
        self.lateness.built(self._now)
        ended = self._carry(self._following.joined(self._status))
        status = self._status
        hosted, step = status.hosted, status.committed
        if not status.has_state:
            hosted, step = view.hosted_by(status.worker), view.resume_step
            self._change(state=StateCopy.CURRENT, committed=step, hosted=hosted)
        return [*ended, self._tell(), *self._begin(), *self._step.synced(step, hosted)]

    def _decided(self, vote: ef.Decided) -> Sequence[Outcome]:
        step, status = vote.step, self._status
        if not self._acting_in(status.view) or step != status.committed:
            return []
        if self._now >= self.acting_until:  # the others may have been told to go on without it
            return self._promise(status.view)
        require(status.reduced, f"step {step} was voted on without its gradient")
        if vote.pending:
            self._last_step_of = status.view
        tasks, hosted = len(status.hosted), status.hosted
        if vote.owners != self._step.owners:
            hosted = tuple(v for v, owner in enumerate(vote.owners) if owner == status.worker)
        # All others needed this worker's share of the step, which it sent after this moment.
        proved_at = self.lateness.began_at
        self.lateness.step(self._now, tasks, timed=self._step.is_timed)
        self._change(
            committed=step + 1,
            reduced=False,
            hosted=hosted,
            phase=Phase.COMPUTING if vote.dropped else Phase.SCRIPT,
            proved_at=proved_at,
        )
        self._step.committed(vote.owners, hosted)
        if self._status.unproven and self._step.is_proved:
            self._change(unproven=False)
        marks = [ef.MarkCommitted(status.view, step)] if self._step.protecting.active else []
        return [*marks, ef.Commit(step, voted=True), *self._step.saves.compared(step + 1)]

    def _doubted(self, invalidation: Invalidation, discarded: bool) -> Sequence[Outcome]:
        self._avoid((invalidation,))
        if discarded:
            self._change(state=StateCopy.DISCARDED, reduced=False)
        return self._promise(self._status.view) or [self._tell()]

    def _caught_up(self, step: int) -> Sequence[Outcome]:
        if step != self._status.committed or self._view is None:
            return []
        self._step.missed_heard()
        self._change(committed=step + 1, phase=Phase.SCRIPT)
        self._step.committed(self._view.owners, ())
        return [ef.Commit(step)]

    # ------------------------------------------------------------ views

    def _directed(self, directive: WorkerDirective) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        self.acting_until = directive.acting_until
        self._release_loop = max(self._release_loop, directive.release_loop)
        self._pending_view = max(self._pending_view, directive.pending_view)
        if directive.stop_view > self._status.promised:
            outcomes += self._promise(directive.stop_view)
        self._step.saves.want(directive.save_wanted)
        view = directive.view
        if view is not None and view.number > max(self._status.view, self._status.promised):
            me = view.member(self._status.worker)
            if self._status.discarded:
                outcomes += self._promise(view.number)  # what it holds is not to be begun from
            elif me is not None and me.incarnation == self._status.incarnation:
                outcomes += self._install(view)
        outcomes += self._ordered(directive.follow)
        return [*outcomes, *self._expire(), *self._release()]

    def _promise(self, number: ViewNumber) -> Sequence[Outcome]:
        if number <= self._status.promised:
            return []
        self._change(promised=number)
        concluded = self._carry(self._step.close())
        return [*concluded, ef.Abort(number), self._tell()]

    def _promise_at_rest(self, number: ViewNumber) -> Sequence[Outcome]:
        """Promise as planned; what others have yet to hear of the last votes is not cut off."""
        promised = self._promise(number)
        self._open_view = number
        return [each for each in promised if not isinstance(each, ef.Abort)]

    def _close_group(self, number: ViewNumber) -> Sequence[Outcome]:
        """Abort a group that was left open at a planned change."""
        if self._open_view != number or number == NO_VIEW:
            return []
        self._open_view = NO_VIEW
        return [ef.Abort(number)]

    def _install(self, view: View) -> Sequence[Outcome]:
        status = self._status
        outcomes = [*self._close_group(self._open_view)]
        if status.view > status.promised:
            outcomes += self._promise(status.view)
        if not view.feeds(status.worker):
            outcomes += self._carry(self._following.end(status))
        status = self._status
        joining, late = status.worker in view.joiners, view.is_late(status.worker)
        require(
            joining != status.has_state or late,
            f"view {view.number} takes worker {status.worker} for "
            f"{'a joiner' if joining else 'a donor'}, but has_state is {status.has_state}",
        )
        require(
            joining or status.committed <= view.resume_step,
            f"view {view.number} goes back to step {view.resume_step} from {status.committed}",
        )
        self._view = view
        self._avoid(view.invalidations)
        committing = not joining and status.committed < view.resume_step
        if committing:
            require(
                status.reduced and status.committed == view.resume_step - 1,
                f"view {view.number} resumes at {view.resume_step}; worker {status.worker} is at "
                f"{status.committed}, reduced: {status.reduced}",
            )
            outcomes.append(ef.Commit(status.committed))
        self._change(
            view=view.number,
            committed=status.committed if joining else view.resume_step,
            reduced=False,
            hosted=() if late else view.hosted_by(status.worker),
            phase=self._phase_in_a_new_view(committing),
            unreached=(),
            unproven=status.worker in view.unproven,
            state=StateCopy.DIRTY if late else status.state,  # of no use until it has caught up
        )
        self.lateness.view(self._now)
        self._looked_in = -1
        outcomes += self._step.feeding.enter(view)
        entered = self._step.enter(view, self._status.committed, self._status.hosted, self._now)
        outcomes += [*self._step.saves.compared(self._status.committed)]
        outcomes += [ef.Install(view), self._tell(), *entered]
        if not view.joiners or self._catches_up(view):
            outcomes += self._begin()
        return [*outcomes, *self._follow()]

    def _phase_in_a_new_view(self, committing: bool) -> Phase:
        phase = self._status.phase
        if committing and self._status.in_step:
            return Phase.SCRIPT
        return Phase.WAITING if phase is Phase.OVERDUE else phase

    def _begin(self) -> Sequence[Outcome]:
        if self._status.phase is not Phase.BOUNDARY:
            return []
        self._change(phase=Phase.COMPUTING)
        step, agreed, view = self._status.committed, self._step.saves.agreed, self._view
        whole = agreed is not None and agreed[0] == step
        whole = whole or self._step.protecting.looks_at_all(step)
        joined = view is not None and bool(view.joiners) and step == view.resume_step
        return [ef.Begin(step, whole, joined)]

    def _copies(self, made: int, *, within: bool) -> Sequence[Outcome]:
        """Have the state copied: to be saved, fed and protected, in this order; `made` are done."""
        view, step, machine = self._view, self._status.committed, self._step
        acts = view is not None and self._acting_in(view.number)
        found: Sequence[Outcome] = machine.saves.at_boundary(step) if within and not made else []
        if not found and made < 2 and view is not None and acts:
            found = machine.feeding.at_boundary(step, view, within=within)
        if not found and acts and within:
            found = machine.protecting.at_boundary(step, self._now)
        return found or self._at_boundary()

    def _at_boundary(self) -> Sequence[Outcome]:
        self._change(phase=Phase.BOUNDARY)
        view = self._view
        if self._following.order is not None:
            return self._follow()
        if view is None:
            return []
        if self._status.promised >= view.number:
            return [self._tell()]
        if self._last_step_of == view.number:
            return self._promise_at_rest(view.number)
        if view.joiners and not self._step.is_synced and not self._catches_up(view):
            return self._step.catch_up()
        return self._begin()

    # ------------------------------------------------------------ fed, or feeding

    def _ordered(self, order: FollowOrder | None) -> Sequence[Outcome]:
        """Hear by which order workers are fed: by this one, or this one by others."""
        feeds = self._step.feeding.told(order, self._view)
        if self._joins_fed:
            return feeds
        acts = self._acting_in(self._status.view)
        found = self._carry(self._following.ordered(order, self._status, acts=acts))
        return [*feeds, *found, self._tell()] if found else feeds

    @property
    def _joins_fed(self) -> bool:
        """Tell whether it is a member, and may still have to apply what it was fed."""
        view, status = self._view, self._status
        joins = view is not None and view.feeds(status.worker) and self._acting_in(view.number)
        return joins and self._following.order is not None

    def _fed(self, event: FedEvent) -> Sequence[Outcome]:
        found = self._carry(self._following.heard(event, self._status))
        if isinstance(event, ev.FedTaken) and found and self._joins_fed:
            self._step.committed(self._step.owners, ())
        return [*found, *self._follow()]

    def _follow(self) -> Sequence[Outcome]:
        """Load or apply what was fed; go on as a member once nothing is missing."""
        found = self._carry(self._following.follow(self._status))
        return found or (self._step.catch_up() if self._joins_fed else [])

    def _feed_failed(self, number: int, reason: str) -> Sequence[Outcome]:
        """Note that an order cannot be carried out here; who depends on it leaves its view."""
        self._step.feeding.failed(number)
        self._change(unfed=max(self._status.unfed, number))
        told = self._note_event("join", f"workers are not fed while others train: {reason}")
        order = self._following.order
        if order is None or order.number != number:
            return told
        left = self._carry(self._promise(self._status.view) if self._joins_fed else [])
        ended = self._carry(self._following.end(self._status))
        return [*told, *left, *ended, self._tell()]

    # ------------------------------------------------------------ time

    def _expire(self) -> Sequence[Outcome]:
        """Fence this worker a second time, in case the agent was too late to pause the process.

        It is also the time to copy what others are late with, or to say that they are late.
        """
        if not self._acting_in(self._status.view):
            return []
        if self._now >= self.acting_until:
            return self._promise(self._status.view)
        outcomes: list[Outcome] = []
        if self._now >= self._look_at():
            self._looked_in = self._status.committed
            outcomes.append(ef.LookWhoIsLate(self._status.view, self._status.committed))
        if self._now >= self._late_at():
            self._change(phase=Phase.OVERDUE)
            outcomes.append(self._tell())
        return outcomes

    def _late_at(self) -> float:
        """Return when it says that others are late, if nothing happens until then."""
        waits = self._status.phase is Phase.WAITING and self._step.is_timed
        return self.lateness.late_at if waits else _FOREVER

    def _look_at(self) -> float:
        """Return when its script may copy what others are late with."""
        waits = self._status.waiting and self._step.is_synced and self._step.is_timed
        return self.lateness.copy_at if waits and self._looked_in < 0 else _FOREVER

    # ------------------------------------------------------------ leaves

    def _link_lost(self, view: ViewNumber, peers: tuple[WorkerId, ...]) -> Sequence[Outcome]:
        if self._status.view != view or set(peers) <= set(self._status.unreached):
            return []
        self._change(unreached=tuple(sorted({*self._status.unreached, *peers})))
        return self._promise(view) or [*self._close_group(view), self._tell()]

    def _avoid(self, more: Invalidations) -> None:
        """Take in invalidations, which may cover what it has said to be saved."""
        news = [each for each in more if not is_covered(each, self._status.invalidations)]
        if news:
            least, saved = min(each.after for each in news), self._status.saved
            known = merge(self._status.invalidations, news)
            self._change(invalidations=known, saved=saved if saved <= least else 0)

    def _note_event(self, kind: str, text: str) -> list[WorkerEffect]:
        events = self._status.events
        number = events[-1].number + 1 if events else 1
        event = JobEvent(number=number, kind=kind, text=text)
        self._change(events=(*events, event)[-JOB_EVENTS_MAX:])
        return [self._tell()]

    def _release(self) -> list[WorkerEffect]:
        loop, leads = self._status.loop, self.leads_now and self._status.has_state
        allowed = self._release_loop >= loop or leads
        if self._status.ended and allowed and self._released_loop < loop:
            self._released_loop = loop
            return [ef.Release(loop)]
        return []

    def _catches_up(self, view: View) -> bool:
        """Tell whether it has yet to apply steps that it has missed."""
        late = view.late_worker(self._status.worker) is not None
        based = view.recall is None or self._step.activity in (Activity.CATCH_UP, Activity.RECEIVE)
        return late and based and self._status.committed < view.resume_step

    def _acting_in(self, number: ViewNumber) -> bool:
        return self._status.view == number > self._status.promised

    def _change(self, **fields: object) -> Sequence[Outcome]:
        seq = self._status.seq + 1
        status = dataclasses.replace(self._status, seq=seq, **fields)  # type: ignore[arg-type]
        self._status = status
        return []

    def _tell(self) -> ef.Tell:
        return ef.Tell(self._status)
