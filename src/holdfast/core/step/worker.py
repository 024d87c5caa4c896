"""The worker machine: what one incarnation of a worker may do, and what it must have promised.

It does not know tensors, sockets, threads or time. Its driver feeds it what happened and carries
out the effects in order. The invariant it keeps: once it has promised a view number, nothing that
happens in that view or an older one can change `committed` or `reduced`; only a newer view can.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from holdfast.core.errors import assert_never, require
from holdfast.core.invalidations import Invalidations, is_invalidated, merge
from holdfast.core.step.speculation import Lateness, Patience
from holdfast.core.types import (
    NO_VIEW,
    Incarnation,
    Invalidation,
    JobEvent,
    Stage,
    View,
    ViewNumber,
    WorkerDirective,
    WorkerId,
    WorkerStatus,
)

JOB_EVENTS_MAX = 8  # that a status carries


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LoopEntered:
    """The script asks for steps; on the first loop the worker becomes a candidate for views."""


@dataclass(frozen=True, slots=True)
class Directed:
    directive: WorkerDirective


@dataclass(frozen=True, slots=True)
class GroupBroken:
    """An exchange of this view failed here."""

    view: ViewNumber
    reason: str


@dataclass(frozen=True, slots=True)
class Loading:
    """The driver starts to overwrite the script's state with the job's."""


@dataclass(frozen=True, slots=True)
class Synced:
    """The view's group works and every joiner holds the state, verified on all members."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class Reduced:
    """The complete reduced gradient of `step` is here."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """The members have agreed to compute `step` again: its gradient is not to be used."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class Voted:
    """Every member's vote on `step` is here; `pending` if any voter knew of a planned change.

    `owners`: who hosts each virtual rank from the next step on, if the votes have changed that.
    `dropped`: what this worker computes of the step does not count, and is not complete.
    """

    view: ViewNumber
    step: int
    pending: bool
    owners: tuple[WorkerId, ...] | None = None
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The gradient of `step`, which the others have committed in an earlier view, is here."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class LocalDone:
    """This worker's own tasks of the current step are done (True) or there are some again."""

    done: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """This worker has computed a task that another one is late with."""


@dataclass(frozen=True, slots=True)
class AtBoundary:
    """The script finished with the last step and asks for the next: the state is at rest."""


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """The script's current loop has no further step."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The network does not reach these members of the view any more."""

    view: ViewNumber
    peers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint of `step`, which the members of `view` have copied, is durable."""

    step: int
    view: ViewNumber


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The checkpoint that `view` is to begin from cannot be read; an older one can (0: none)."""

    view: ViewNumber
    step: int
    older: int


@dataclass(frozen=True, slots=True)
class Doubted:
    """The members of a view have found out that copies of the state are not to be believed.

    `discarded`: nor are the states of its members.
    """

    invalidation: Invalidation
    discarded: bool


@dataclass(frozen=True, slots=True)
class EventNoted:
    """Something for the job's event log."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the right to act may have ended."""


WorkerEvent = (
    LoopEntered
    | Directed
    | GroupBroken
    | Loading
    | Synced
    | Reduced
    | Reopened
    | Voted
    | CaughtUp
    | LocalDone
    | Copied
    | AtBoundary
    | LoopEnded
    | LinkLost
    | Saved
    | Unreadable
    | Doubted
    | EventNoted
    | Tick
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this status to the agent, soon and in order."""

    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class Abort:
    """Break the group of this view (and of every older one) at once."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class Install:
    """Build the group of this view, bring joiners up to date, then go on with its step."""

    view: View


@dataclass(frozen=True, slots=True)
class Commit:
    """The script may apply the gradient of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The script may leave the boundary and compute `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Speculate:
    """The script, which waits, may compute the tasks of `step` that others are late with."""

    step: int


@dataclass(frozen=True, slots=True)
class Release:
    """The script may leave its ended loop."""

    loop: int


WorkerEffect = Tell | Abort | Install | Commit | Begin | Speculate | Release

# ---------------------------------------------------------------- the machine


class WorkerMachine:
    """See the module's docstring; `handle` is the only mutator."""

    def __init__(
        self, worker: WorkerId, incarnation: Incarnation, patience: Patience | None = None
    ) -> None:
        self.lateness = Lateness(patience or Patience())
        self._status = WorkerStatus(worker=worker, incarnation=incarnation)
        self._view: View | None = None
        self._owners: tuple[WorkerId, ...] = ()
        self._synced = False
        self._held = False  # the script waits at a boundary
        self._stop_next = False  # a vote announced a planned change: stop at the next boundary
        self._pending_view = NO_VIEW
        self._release_loop = 0
        self._released_loop = 0
        self._copying = False  # the script has been told that it may copy tasks of this step
        self.acting_until = float("inf")  # by its node's clock

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:  # noqa: RET503
        """Apply one event at time `now` (seconds, any fixed origin); returns effects in order."""
        match event:
            case LoopEntered():
                return self._loop_entered()
            case Directed(directive):
                return self._directed(directive, now)
            case GroupBroken(view):
                return self._promise(view)
            case Loading():
                self._change(dirty=True)
                return []
            case Synced(view):
                return self._group_synced(view, now)
            case Reduced(view, step):
                if self._acting_in(view) and step == self._status.committed:
                    self._change(reduced=True)
                return []
            case Reopened(view, step):
                if self._acting_in(view) and step == self._status.committed:
                    self._change(reduced=False)
                return []
            case Voted():
                return self._voted(event, now)
            case CaughtUp(view, step):
                return self._caught_up(view, step)
            case LocalDone(done):
                self._change(waiting=done)
                self.lateness.done(now)
                self._copying = False
                return [] if self._acting_in(self._status.view) else [self._tell()]
            case Copied():
                self.lateness.copied += 1
                return []
            case AtBoundary():
                return self._at_boundary()
            case LoopEnded():
                self._change(ended=True, waiting=False)
                return [self._tell(), *self._release(now)]
            case LinkLost(view, peers):
                return self._link_lost(view, peers)
            case Saved(step, view):
                if not is_invalidated(self._status.invalidations, step, view):
                    self._change(saved=step)
                return [self._tell()]
            case Unreadable(view, step, older):
                self._change(unreadable=step, saved=older, dirty=True)
                return self._promise(view) or [self._tell()]
            case Doubted(invalidation, discarded):
                return self._doubted(invalidation, discarded)
            case EventNoted(kind, text):
                return self._note_event(kind, text)
            case Tick():
                return self._expire(now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """When its right to act ends, or others will be late; None while it does not act."""
        if not self._acting_in(self._status.view):
            return None
        return min(self.acting_until, self._late_at(), self._copy_at())

    def snapshot(self) -> WorkerStatus:
        return self._status

    @property
    def view(self) -> View | None:
        return self._view

    @property
    def owners(self) -> tuple[WorkerId, ...]:
        """Who hosts each virtual rank in the step to be committed next."""
        return self._owners

    @property
    def at_rest(self) -> bool:
        """Whether the script has applied all that is committed, and waits."""
        return self._held or self._status.ended

    @property
    def pending(self) -> bool:
        """What this worker says in its votes: it knows of a planned change to the current view."""
        return self._view is not None and self._pending_view >= self._view.number

    def leads(self, now: float) -> bool:
        view = self._view
        return (
            view is not None
            and view.leader == self._status.worker
            and view.number > self._status.promised
            and now < self.acting_until
        )

    def check(self) -> None:
        status = self._status
        number = self._view.number if self._view else NO_VIEW
        require(status.view == number, f"status shows view {status.view}, installed is {number}")
        require(not status.reduced or status.has_state, "a gradient without a state")
        require(not (status.at_boundary and not self._held), "at rest but the script is running")

    # ------------------------------------------------------------ transitions

    def _loop_entered(self) -> list[WorkerEffect]:
        status = self._status
        self._change(stage=Stage.READY, loop=status.loop + 1, ended=False)
        return [self._tell()]

    def _directed(self, directive: WorkerDirective, now: float) -> list[WorkerEffect]:
        effects: list[WorkerEffect] = []
        self.acting_until = directive.acting_until
        self._release_loop = max(self._release_loop, directive.release_loop)
        self._pending_view = max(self._pending_view, directive.pending_view)
        if directive.stop_view > self._status.promised:
            effects += self._promise(directive.stop_view)
        view = directive.view
        if view is not None and view.number > max(self._status.view, self._status.promised):
            me = view.member(self._status.worker)
            if self._status.discarded:
                effects += self._promise(view.number)  # what it holds is not to be begun from
            elif me is not None and me.incarnation == self._status.incarnation:
                effects += self._install(view, now)
        return effects + self._expire(now) + self._release(now)

    def _expire(self, now: float) -> list[WorkerEffect]:
        """The second fence, for when the agent itself was too late to pause this process.

        And the time to copy what others are late with, or to say that they are.
        """
        if not self._acting_in(self._status.view):
            return []
        if now >= self.acting_until:
            return self._promise(self._status.view)
        effects: list[WorkerEffect] = []
        if now >= self._copy_at():
            self._copying = True
            effects.append(Speculate(self._status.committed))
        if now >= self._late_at():
            self._change(late=True)
            effects.append(self._tell())
        return effects

    def _late_at(self) -> float:
        """When it says that others are late, if nothing happens until then."""
        status = self._status
        return self.lateness.late_at if status.waiting and not status.late else float("inf")

    def _copy_at(self) -> float:
        """When its script may copy what others are late with."""
        waits = self._status.waiting and self._synced and not self._copying
        return self.lateness.copy_at if waits else float("inf")

    def _link_lost(self, view: ViewNumber, peers: tuple[WorkerId, ...]) -> list[WorkerEffect]:
        if self._status.view != view or set(peers) <= set(self._status.unreached):
            return []
        self._change(unreached=tuple(sorted({*self._status.unreached, *peers})))
        return self._promise(view) or [self._tell()]

    def _promise(self, number: ViewNumber) -> list[WorkerEffect]:
        if number <= self._status.promised:
            return []
        self._change(promised=number, at_boundary=self._held and self._status.has_state)
        return [Abort(number), self._tell()]

    def _install(self, view: View, now: float) -> list[WorkerEffect]:
        status = self._status
        effects: list[WorkerEffect] = []
        if status.view > status.promised:
            effects += self._promise(status.view)
        joining = status.worker in view.joiners
        require(
            joining != status.has_state or view.late_worker(status.worker) is not None,
            f"view {view.number} takes worker {status.worker} for "
            f"{'a joiner' if joining else 'a donor'}, but has_state is {status.has_state}",
        )
        self._view, self._synced, self._stop_next = view, False, False
        self._owners = view.owners
        require(
            joining or status.committed <= view.resume_step,
            f"view {view.number} goes back to step {view.resume_step} from {status.committed}",
        )
        self._avoid(view.invalidations)
        behind = view.late_worker(status.worker) is not None
        committing = not joining and status.committed < view.resume_step
        if committing:
            require(
                status.reduced and status.committed == view.resume_step - 1,
                f"view {view.number} resumes at {view.resume_step}; worker {status.worker} is at "
                f"{status.committed}, reduced: {status.reduced}",
            )
            effects.append(Commit(status.committed))
        self._change(
            view=view.number,
            committed=status.committed if joining else view.resume_step,
            reduced=False,
            hosted=() if behind else view.hosted_by(status.worker),
            at_boundary=False,
            waiting=status.waiting and not committing,
            in_step=status.in_step and not committing,
            late=False,
            unreached=(),
        )
        if behind:  # of no use to anybody until it has caught up
            self._change(has_state=False, dirty=True)
        self.lateness.view(now)
        self._copying = False
        effects += [Install(view), self._tell()]
        if not view.joiners or self._catches_up(view):
            effects += self._begin()
        return effects

    def _group_synced(self, number: ViewNumber, now: float) -> list[WorkerEffect]:
        if not self._acting_in(number) or self._view is None or self._synced:
            return []
        self._synced = True
        self.lateness.built(now)
        if not self._status.has_state:
            hosted = self._view.hosted_by(self._status.worker)
            step = self._view.resume_step
            self._change(has_state=True, dirty=False, committed=step, hosted=hosted)
        return [self._tell(), *self._begin()]

    def _begin(self) -> list[WorkerEffect]:
        if not self._held:
            return []
        self._held = False
        self._change(at_boundary=False, in_step=True)
        return [Begin(self._status.committed)]

    def _voted(self, vote: Voted, now: float) -> list[WorkerEffect]:
        step = vote.step
        if not self._acting_in(vote.view) or step != self._status.committed:
            return []
        if now >= self.acting_until:  # the others may have been told to go on without it
            return self._promise(vote.view)
        require(self._status.reduced, f"step {step} was voted on without its gradient")
        self._stop_next = vote.pending
        tasks = len(self._status.hosted)
        if vote.owners is not None:
            self._owners, me = vote.owners, self._status.worker
            self._change(hosted=tuple(v for v, owner in enumerate(vote.owners) if owner == me))
        # All others needed this worker's share of the step, which it sent after this moment.
        proved_at = self.lateness.began_at
        self.lateness.step(now, tasks)
        self._copying = False
        self._change(
            committed=step + 1,
            reduced=False,
            waiting=False,
            late=False,
            in_step=vote.dropped,
            proved_at=proved_at,
        )
        return [Commit(step)]

    def _caught_up(self, number: ViewNumber, step: int) -> list[WorkerEffect]:
        if not self._acting_in(number) or step != self._status.committed:
            return []
        self._change(committed=step + 1, waiting=False, in_step=False)
        return [Commit(step)]

    def _at_boundary(self) -> list[WorkerEffect]:
        self._held = True
        self._change(in_step=False)
        view = self._view
        if view is None:
            return []
        if self._status.promised >= view.number:
            self._change(at_boundary=self._status.has_state)
            return [self._tell()]
        if self._stop_next:
            return self._promise(view.number)
        if view.joiners and not self._synced and not self._catches_up(view):
            return []
        return self._begin()

    def _doubted(self, invalidation: Invalidation, discarded: bool) -> list[WorkerEffect]:
        newest = max(
            invalidation.view, self._status.view
        )  # it may have been told of another meanwhile
        self._avoid((dataclasses.replace(invalidation, view=newest),))
        if discarded:
            self._change(discarded=True, has_state=False, dirty=True)
        return self._promise(self._status.view) or [self._tell()]

    def _avoid(self, more: Invalidations) -> None:
        """What it has said to be saved may be invalidated, too."""
        news = [
            invalidation for invalidation in more if invalidation not in self._status.invalidations
        ]
        if news:
            least, saved = min(invalidation.after for invalidation in news), self._status.saved
            invalidations = merge(self._status.invalidations, news)
            self._change(invalidations=invalidations, saved=saved if saved <= least else 0)

    def _note_event(self, kind: str, text: str) -> list[WorkerEffect]:
        events = self._status.events
        number = events[-1].number + 1 if events else 1
        event = JobEvent(number=number, kind=kind, text=text)
        self._change(events=(*events, event)[-JOB_EVENTS_MAX:])
        return [self._tell()]

    def _release(self, now: float) -> list[WorkerEffect]:
        loop = self._status.loop
        allowed = self._release_loop >= loop or self.leads(now)
        if self._status.ended and allowed and self._released_loop < loop:
            self._released_loop = loop
            return [Release(loop)]
        return []

    # ------------------------------------------------------------ leaves

    def _catches_up(self, view: View) -> bool:
        """Whether it has yet to apply steps that it has missed."""
        return view.late_worker(self._status.worker) is not None and (
            self._status.committed < view.resume_step
        )

    def _acting_in(self, number: ViewNumber) -> bool:
        return self._status.view == number > self._status.promised

    def _change(self, **fields: object) -> None:
        seq = self._status.seq + 1
        status = dataclasses.replace(self._status, seq=seq, **fields)  # type: ignore[arg-type]
        self._status = status

    def _tell(self) -> Tell:
        return Tell(self._status)
