"""Runs a member of a view from one step to the next, once all members hold the same state.

It decides when sums begin, what to vote, and what follows from the votes. `ScriptTasks` decides
what the script computes, `Judging` whom to believe and when to compute again. The machine knows
neither membership nor how states are obtained: what concerns these it returns as a verdict. The
invariant it keeps: a member votes only for sums that all members have judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.engine.core.ground import effects
from holdfast.engine.core.ground.events import (
    CountSettled,
    Doubt,
    Gathered,
    MemberDone,
    Purpose,
    Row,
    SinkKind,
    StepOpened,
    SumChecked,
    Summed,
    TaskDone,
    Topic,
)
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.step.activities import Activity
from holdfast.engine.core.step.audit import Alike
from holdfast.engine.core.step.audits import Audits
from holdfast.engine.core.step.backup import CountedMembers
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.course import Course
from holdfast.engine.core.step.judging import Again, Judged, Judgement, Judging
from holdfast.engine.core.step.late_watch import LateWatch
from holdfast.engine.core.step.newcomers import Newcomers
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.step.script_tasks import ScriptTasks
from holdfast.engine.core.step.step_policy import Counting, StepPolicy
from holdfast.engine.core.step.verdicts import Agreed, Decided, Doubted, Failed, Verdict
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View


class StepMachine:
    """Runs a member's steps, as the module describes."""

    def __init__(
        self,
        standing: Standing,
        policy: StepPolicy,
        copies: Copies,
        following: Following,
        counting: Callable[[View, BalancePolicy | None], Counting] = Counting,
    ) -> None:
        self.course = Course(standing)
        self.watch = LateWatch(standing, policy.patience)
        # It has committed tasks in this view that another member has computed, too.
        self.is_proved = False
        self._standing = standing
        self._policy = policy
        self._copies = copies
        self._make_counting = counting
        self._counting: Counting
        self._counted = CountedMembers(policy.backup, standing)
        self._newcomers = Newcomers(looks=policy.cycle > 0)
        audits = policy.seed, policy.audit, policy.audit_tolerance
        self._audits = Audits(*audits, self._newcomers, policy.script_cycle)
        self._rulings = Rulings(standing.me, policy.cycle, keeps=policy.keeps, looks=policy.looks)
        self.tasks = ScriptTasks(
            standing, self.course, following, self._audits, self._counted, self.watch
        )
        self.judging = Judging(standing, self.course, self._audits, self._rulings, self._newcomers)

    # ------------------------------------------------------------ views

    def enter(self, view: View) -> None:
        """A view is installed; what this worker hosts in it may be computed at once."""
        self.course.enter(view)
        self.tasks.enter()
        self.judging.forget()
        self.watch.late = ()
        self._counted.enter(view)
        self._audits.enter()
        self._rulings.enter(view)
        self.tasks.proceed()

    def close(self) -> Doubted | None:
        """Give the view up; return the doubts of a member that was about to report a fault."""
        reports_fault = self.course.activity is Activity.REPORT_FAULT
        self.course.go_to(Activity.CLOSED)
        self.watch.late = ()
        return self.judging.conclude(None) if reports_fault else None

    def agree(self) -> None:
        """Gather the agreements that joiners, and members that missed a vote, do not know."""
        self.course.go_to(Activity.AGREE)
        number = self.course.view.number
        audits, policy = self._audits, self._policy
        row = int(audits.alike), audits.whole_step, policy.processor, int(self._standing.is_exact)
        self._standing.order(
            effects.Forget(SinkKind.LATE, number), effects.Gather(number, Topic.AGREE, row)
        )

    def _handle_agreement(self, rows: Sequence[Row]) -> Agreed:
        view, audits = self.course.view, self._audits
        audits.hear(view, rows, drops=self._policy.backup.workers > 0)
        self._rulings.script.comparable = audits.is_comparable
        self._counting = self._make_counting(view, self._policy.balance)
        self._rulings.record_sync(compared=bool(view.joiners) and not view.fed)
        self.course.go_to(Activity.SYNC)
        return Agreed()

    def begin_steps(self) -> None:
        """Begin the steps: all members hold the same state."""
        self.course.go_to(Activity.TASKS)
        self.advance()

    # ------------------------------------------------------------ tasks and sums

    def handle_opened(self, event: StepOpened) -> None:
        """Start the tasks of the step for which the script is ready."""
        if not event.rested:
            self._copies.postpone(event.step)
            self._audits.postpone(event.step)
        self.tasks.open(event)
        self.advance()

    def handle_task(self, task: TaskDone) -> None:
        """Record a finished task; ignore tasks of older steps."""
        if not self.tasks.record(task):
            return
        course = self.course
        is_copy = task.purpose is Purpose.SPECULATIVE and course.activity is Activity.ROWS
        if is_copy:
            self.watch.late = ()
        self.advance()
        if is_copy:
            self._standing.order(effects.LookWhoIsLate(course.view.number, course.step))

    def handle_counted(self, event: MemberDone | CountSettled) -> None:
        """Take in that a member has done all its tasks, or whose results count."""
        if self._counted.record(event):
            self.advance()

    def advance(self) -> None:
        """Do everything that can be done now."""
        self.tasks.proceed()
        if self.course.activity is Activity.TASKS:
            self._begin_sums()
        if self.course.activity is Activity.SUM:
            self._share_rows()
        if self.course.activity is Activity.AUDITING:
            self._carry_out(self.judging.audit(self.tasks.opened))

    def _begin_sums(self) -> None:
        course, step = self.course, self.tasks.opened
        counted = None if step is None else self._counted.settle(step)
        if counted is None:
            return
        if self.tasks.is_dropped:
            self.tasks.proceed()  # the script skips dropped tasks
        course.go_to(Activity.SUM)
        order = effects.Reduce(course.view.number, course.step, course.owners, counted)
        self._standing.order(order)

    def _share_rows(self) -> None:
        course, step = self.course, self.tasks.opened
        hosted = self._standing.status.hosted
        if step is not None and (self.tasks.is_dropped or not step.missing_tasks(hosted)):
            course.go_to(Activity.ROWS)
            self._standing.order(effects.ShareRows(course.view.number, course.step))

    # ------------------------------------------------------------ judging

    def handle_sums(self, event: Summed) -> None:
        """Compare states, then audited tasks, then the new sums, before the vote."""
        if self.course.activity is not Activity.ROWS or event.step != self.course.step:
            return
        self.judging.sums, self.watch.late = event, ()
        self.course.go_to(Activity.AUDITING)
        if self._policy.cycle and not self.judging.compare_states(event):
            return
        self._copies.feeding.record_copies(event.copies)
        self.advance()

    def handle_sum_check(self, event: SumChecked) -> None:
        """Take in the members' answers about a bucket's sum."""
        self._carry_out(self.judging.handle_sum_check(event))

    def handle_gathered(self, event: Gathered) -> Verdict | None:
        """Take in the words of all members on a topic; return a verdict for the other machines."""
        course = self.course
        match event.topic:
            case Topic.AGREE if course.activity is Activity.AGREE:
                return self._handle_agreement(event.rows)
            case Topic.AUDIT if course.activity is Activity.AUDIT:
                self._carry_out(self.judging.handle_audit(event.rows))
            case Topic.VOTE if course.activity is Activity.VOTE:
                return self._handle_votes(event.rows)
            case Topic.REPORT_FAULT if course.activity is Activity.REPORT_FAULT:
                course.go_to(Activity.CLOSED)
                return self.judging.conclude(event.rows) or Failed("a worker is wrong")
        return None

    def _carry_out(self, judgement: Judgement) -> None:
        """Vote, or keep the gradient first, or have the step computed again."""
        course = self.course
        match judgement:
            case Judged(is_believed):
                if is_believed and self._copies.replicating.is_active:
                    course.go_to(Activity.KEEP)
                    order = effects.KeepStep(SinkKind.MEMORY, course.view.number, course.step)
                    self._standing.order(order)
                else:
                    self._vote(is_believed=is_believed)
            case Again(audits):
                self.judging.forget()
                self._standing.record_reduced(False)
                self.tasks.repeat(audits)
                if course.activity is Activity.TASKS:
                    self.advance()

    def handle_kept_gradient(self, step: int, *, full: bool) -> None:
        """Continue to the vote, now that the gradient is in the nodes' memory."""
        if self.course.activity is Activity.KEEP and step == self.course.step:
            self._copies.replicating.full = full
            self._vote(is_believed=True)

    # ------------------------------------------------------------ the vote

    def _vote(self, *, is_believed: bool) -> None:
        """Vote on the step; `is_believed`: its gradient may be used."""
        standing, course, copies = self._standing, self.course, self._copies
        course.go_to(Activity.VOTE)
        standing.record_reduced(is_believed)
        sums = self.judging.sums
        assert sums is not None, "a vote without sums"
        copies.record_step()
        leads, ends = standing.leads_now, standing.ends_saved
        save, busy = copies.saves.opinion(course.step, standing.now, leads=leads, ends=ends)
        vote = Vote(
            view=course.view.number,
            step=course.step,
            pending=standing.is_change_pending and not standing.ends_saved,
            save=save,
            busy=busy,
            alike=int(self._audits.alike),
            doubt=self.judging.doubt,
            compute_us=0 if self.tasks.is_dropped else sums.compute_us,
            wait=sums.wait,
            follow=copies.feeding.opinion(),
            protect=copies.replicating.opinion(course.step, standing.leads_now),
            staged=copies.replicating.staged,
        )
        standing.order(effects.Gather(course.view.number, Topic.VOTE, vote.row()))

    def _handle_votes(self, rows: Sequence[Row]) -> Verdict | None:
        standing, course, rulings = self._standing, self.course, self._rulings
        view, tally = course.view, self._counting.count(rows)
        if tally.alien:
            return Failed(f"votes of view {view.number}, step {course.step} do not match")
        if max(tally.doubts) > Doubt.CONFIRMED_NON_FINITE:
            suspects = [view.workers[d - Doubt.BLAMED] for d in tally.doubts if d >= Doubt.BLAMED]
            sums = self.judging.sums
            rulings.record_doubt(course.step, suspects, sums.bits if sums else 0)
            self._carry_out(Again(self._audits.audit_all(view, course.step, course.owners)))
            return None
        rightly = Doubt.CONFIRMED_NON_FINITE in tally.doubts
        standing.carry(rulings.settle(course.step, rightly=rightly))
        whole_step = course.step + 1 if tally.save or tally.protect else self._audits.whole_step
        self._audits.agree(Alike(tally.alike), whole_step)
        self._copies.agree(course.step, view, tally)
        if view.suspended:
            standing.order(effects.KeepStep(SinkKind.LATE, view.number, course.step))
        if self.tasks.is_timed:
            standing.carry(self._counting.observe(tally, standing.leads_now))
        step, hosted = self.tasks.opened, standing.status.hosted
        dropped = self.tasks.is_dropped and step is not None and step.count_used(hosted) is None
        return Decided(course.step, tally.pending, self._counting.owners, dropped)

    def record_commit(self, owners: tuple[WorkerId, ...]) -> None:
        """Record that the step is committed, and begin the next one."""
        self.course.owners = owners
        self.is_proved = self._newcomers.record_commit(self._standing.me)
        if self.course.activity is Activity.VOTE:
            self.course.go_to(Activity.TASKS)
