"""Keeps the promises of a worker: which views it leaves, and when it may act. Pure.

The invariant it keeps: once a view number is promised, no event of that view or an older one
changes `committed` or `reduced`; only a newer view can.
"""

from __future__ import annotations

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.errors import require
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.invalidations import Invalidation, Invalidations, is_covered, merge
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.replica.replica import Replica
from holdfast.engine.core.step.step_machine import StepMachine
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.types import NO_VIEW, ViewNumber, WorkerId, name_workers
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, ReplicaStage, WorkerStatus


class Membership:
    """Decides which views a worker enters and leaves, and when it acts in them."""

    def __init__(
        self, standing: Standing, replica: Replica, following: Following, step: StepMachine
    ) -> None:
        self._standing = standing
        self._replica = replica
        self._following = following
        self._step = step
        self._last_step_of = NO_VIEW  # the view whose votes announced a change: it ends soon
        self._open_view = NO_VIEW  # promised at a boundary: its group is aborted with the next one
        self._release_loop = 0
        self._released_loop = 0

    # ------------------------------------------------------------ directives

    def heed(self, directive: WorkerDirective) -> None:
        """Take in what the agent passes on of views and of the right to act."""
        standing = self._standing
        standing.acting_until = directive.acting_until
        self._release_loop = max(self._release_loop, directive.release_loop)
        if directive.pending_view >= standing.pending_view:
            standing.pending_view = directive.pending_view
            standing.pending_save = directive.pending_save
        self.promise(directive.stop_view)

    def enter(self, view: View | None) -> bool:
        """Install a view if it is newer and names this process; return whether it was installed."""
        status = self._standing.status
        if view is None or view.number <= max(status.view, status.promised):
            return False
        if status.discarded:
            self.promise(view.number)  # no view may begin from its state
            return False
        if not view.includes(status.worker, status.incarnation):
            return False
        self._install(view)
        return True

    def release(self) -> None:
        """Release the script from its ended loop, once that is allowed."""
        standing = self._standing
        loop, leads = standing.status.loop, standing.leads_now and standing.status.has_state
        allowed = self._release_loop >= loop or leads
        if standing.status.ended and allowed and self._released_loop < loop:
            self._released_loop = loop
            standing.order(ef.Release(loop))

    # ------------------------------------------------------------ promises

    def promise(self, number: ViewNumber, why: str = "") -> bool:
        """Never act again in views up to this one; return whether that is new.

        `why`: the reason if it was not ordered, as a phrase that follows this worker's name.
        """
        if not self._promise(number, why):
            return False
        self._standing.order(ef.Abort(number))
        self._standing.tell()
        return True

    def promise_at_rest(self, number: ViewNumber) -> None:
        """Promise as planned; the last votes still reach all members."""
        if self._promise(number):
            self._standing.tell()
        self._open_view = number

    def close_group(self, number: ViewNumber) -> bool:
        """Abort a group that was left open at a planned change; return whether it was open."""
        if self._open_view != number or number == NO_VIEW:
            return False
        self._open_view = NO_VIEW
        self._standing.order(ef.Abort(number))
        return True

    def ends_at_boundary(self, number: ViewNumber) -> bool:
        """Return whether the last votes of a view have announced that it ends now."""
        return self._last_step_of == number

    def announce_end(self) -> None:
        """Record that a vote has announced a change of the present view."""
        self._last_step_of = self._standing.status.view

    def handle_broken_group(self, event: ev.GroupBroken) -> None:
        """Give up a view whose exchange has failed."""
        why = f"cannot exchange with the others ({event.reason})"
        if event.peer is not None:
            why = f"lost its connection to worker {event.peer}"
        if not self.promise(event.view, why):
            self.close_group(event.view)

    def handle_lost_link(self, number: ViewNumber, peers: tuple[WorkerId, ...]) -> None:
        """Give up a view some of whose members cannot be reached any more."""
        standing = self._standing
        unreached = standing.status.unreached
        if standing.status.view != number or set(peers) <= set(unreached):
            return
        standing.change(unreached=tuple(sorted({*unreached, *peers})))
        if not self.promise(number, f"does not reach {name_workers(peers)}"):
            self.close_group(number)
            standing.tell()

    def is_fenced(self) -> bool:
        """Return whether the right to act has ended; then promise the present view.

        It fences the worker a second time, in case its agent was too late to pause the process.
        """
        standing = self._standing
        if standing.now < standing.acting_until:
            return False
        self.promise(standing.status.view, "lost its right to act: its node hears no coordinator")
        return True

    def doubt(self, doubted: Doubted) -> None:
        """Do not believe copies of the state any more; leave the view."""
        self._disbelieve(doubted)
        if not self.promise(self._standing.status.view, "left it, since a worker computes wrongly"):
            self._standing.tell()

    def lose_state(self) -> None:
        """Give the job's state up on all workers: no later step can be computed from it."""
        status = self._standing.status
        # Earlier checkpoints are right: only the present state cannot be used any more.
        invalid = Invalidation(after=status.committed, view=status.view)
        self.doubt(Doubted(invalid, discarded=True))

    def _promise(self, number: ViewNumber, why: str = "") -> bool:
        standing = self._standing
        if number <= standing.status.promised:
            return False
        standing.change(promised=number, left_for=why)
        doubted = self._step.close()
        self._replica.close()
        if doubted is not None:
            self._disbelieve(doubted)
            standing.tell()
        return True

    def _disbelieve(self, doubted: Doubted) -> None:
        self._avoid((doubted.invalidation,))
        if doubted.discarded:
            self._standing.change(state=ReplicaStage.DISTRUSTED, reduced=False)

    def _avoid(self, more: Invalidations) -> None:
        """Take in invalidations, which may cover a checkpoint that it has reported."""
        status = self._standing.status
        news = [each for each in more if not is_covered(each, status.invalidations)]
        if news:
            least, saved = min(each.after for each in news), status.saved
            known = merge(status.invalidations, news)
            self._standing.change(invalidations=known, saved=saved if saved <= least else 0)

    # ------------------------------------------------------------ a new view

    def _install(self, view: View) -> None:
        standing = self._standing
        self.close_group(self._open_view)
        if standing.status.view > standing.status.promised:
            self.promise(standing.status.view)
        if not view.feeds(standing.me):
            self._following.end()
        status = standing.status
        joining, late = status.worker in view.joiners, view.is_late(status.worker)
        committing = not joining and status.committed < view.resume_step
        _check_install(view, status, committing=committing)
        standing.view = view
        self._avoid(view.invalidations)
        if committing:
            standing.order(ef.Commit(status.committed))
        standing.change(
            view=view.number,
            committed=status.committed if joining else view.resume_step,
            reduced=False,
            hosted=() if late else view.hosted_by(status.worker),
            phase=_phase_in_a_new_view(status, committing=committing),
            unreached=(),
            left_for="",
            unproven=status.worker in view.unproven,
            state=ReplicaStage.OBTAINING if late else status.state,  # until it has caught up
        )
        self._step.watch.lateness.record_view(standing.now)
        self._step.watch.look_again()
        self._replica.enter(view)
        standing.order(ef.Install(view))
        standing.tell()
        self._step.enter(view)


def _check_install(view: View, status: WorkerStatus, *, committing: bool) -> None:
    """Assert that a view is right about the state and the steps of this worker."""
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
    require(
        not committing or (status.reduced and status.committed == view.resume_step - 1),
        f"view {view.number} resumes at {view.resume_step}; worker {status.worker} is at "
        f"{status.committed}, reduced: {status.reduced}",
    )


def _phase_in_a_new_view(status: WorkerStatus, *, committing: bool) -> Phase:
    if committing and status.in_step:
        return Phase.SCRIPT
    return Phase.WAITING if status.phase is Phase.OVERDUE else status.phase
