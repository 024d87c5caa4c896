"""Runs a member of a view from one step to the next, once all members hold the same state.

It decides what the script computes, when sums begin, whom to believe, when to compute again, what
to vote and what follows from the votes. It knows neither membership nor how states are obtained:
what concerns these it returns as a verdict. The invariant it keeps: a member votes only for sums
that all members have judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.engine.core.errors import require
from holdfast.engine.core.ground import effects
from holdfast.engine.core.ground.events import (
    CountSettled,
    Doubt,
    EventNoted,
    Gathered,
    MemberDone,
    Purpose,
    Row,
    SinkKind,
    StepKind,
    StepOpened,
    StillAwaited,
    SumChecked,
    Summed,
    TaskDone,
    Topic,
)
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.replica.copies import Copies
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.step.activities import ACTIVITY_MOVES, STEPPING, SUMMED, Activity
from holdfast.engine.core.step.audit import Alike, Audit, Sentence
from holdfast.engine.core.step.audits import Audits
from holdfast.engine.core.step.backup import CountedMembers
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.late_watch import LateWatch
from holdfast.engine.core.step.newcomers import Newcomers, Refusal
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.step.step_policy import Counting, StepPolicy
from holdfast.engine.core.step.sum_trial import SumTrial
from holdfast.engine.core.step.verdicts import Agreed, Decided, Doubted, Failed, Verdict
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

NO_MAJORITY = "and none has a majority"


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
        self._activity = Activity.CLOSED
        self.owners: tuple[WorkerId, ...] = ()  # the hosts of the virtual ranks in that step
        # It has committed tasks in this view that another member has computed, too.
        self.is_proved = False
        self.watch = LateWatch(standing, policy.patience)
        self._standing = standing
        self._policy = policy
        self._copies = copies
        self._following = following
        self._make_counting = counting
        self._newcomers = Newcomers(looks=policy.cycle > 0)
        audits = policy.seed, policy.audit, policy.audit_tolerance
        self._audits = Audits(*audits, self._newcomers, policy.script_cycle)
        self._rulings = Rulings(standing.me, policy.cycle, keeps=policy.keeps, looks=policy.looks)
        self._view: View
        self._counting: Counting
        self._open: OpenStep | None = None
        self._counted = CountedMembers(policy.backup, standing)
        self._again: tuple[Audit, ...] = ()  # to be computed in the next attempt at the step
        self._sums: Summed | None = None
        self._to_check: list[int] = []  # buckets
        self._trial: SumTrial | None = None

    # ------------------------------------------------------------ views

    def enter(self, view: View) -> None:
        """A view is installed; what this worker hosts in it may be computed at once."""
        self._view = view
        self._go_to(Activity.SYNC)
        self.owners = view.owners
        if self._open is not None and self._open.index != self.step:
            self._open = None
        self._sums, self._trial, self.watch.late = None, None, ()
        self._counted.enter(view)
        self._audits.enter()
        self._rulings.enter(view)
        self._continue_script()

    def close(self) -> Doubted | None:
        """Give the view up; return the doubts of a member that was about to report a fault."""
        reports_fault = self.activity is Activity.REPORT_FAULT
        self._go_to(Activity.CLOSED)
        self.watch.late = ()
        return self._conclude(None) if reports_fault else None

    def agree(self) -> None:
        """Gather the agreements that joiners, and members that missed a vote, do not know."""
        self._go_to(Activity.AGREE)
        number = self._view.number
        audits, policy = self._audits, self._policy
        row = int(audits.alike), audits.whole_step, policy.processor, int(self._standing.is_exact)
        self._standing.order(
            effects.Forget(SinkKind.LATE, number), effects.Gather(number, Topic.AGREE, row)
        )

    def _handle_agreement(self, rows: Sequence[Row]) -> Agreed:
        view, audits = self._view, self._audits
        audits.hear(view, rows, drops=self._policy.backup.workers > 0)
        self._rulings.script.comparable = audits.is_comparable
        self._counting = self._make_counting(view, self._policy.balance)
        self._rulings.record_sync(compared=bool(view.joiners) and not view.fed)
        self._go_to(Activity.SYNC)
        return Agreed()

    def begin_steps(self) -> None:
        """Begin the steps: all members hold the same state."""
        self._go_to(Activity.TASKS)
        self.advance()

    @property
    def activity(self) -> Activity:
        """Return the activity of the view's members, as far as this member knows."""
        return self._activity

    def _go_to(self, activity: Activity) -> None:
        self._activity = ACTIVITY_MOVES.check(self._activity, activity)

    def check(self) -> None:
        """Assert the invariants between two events."""
        closed = self._activity is Activity.CLOSED
        require(closed is not self._standing.acts, f"acts while {self._activity.value}")
        holds = self._sums is not None
        require(holds or self._activity not in SUMMED, f"no sums while {self._activity.value}")

    @property
    def step(self) -> int:
        """Return the step to be committed next."""
        return self._standing.status.committed

    @property
    def is_synced(self) -> bool:
        """Return whether the members of the view take steps by now."""
        return self.activity in STEPPING

    # ------------------------------------------------------------ the script

    def handle_opened(self, event: StepOpened) -> None:
        """Start the tasks of the step for which the script is ready."""
        if not event.rested:
            self._copies.postpone(event.step)
            self._audits.postpone(event.step)
        self._open = OpenStep(event.step, event.kind)
        self.watch.open_step()
        self.advance()

    @property
    def is_timed(self) -> bool:
        """Return whether the time of the open step counts as the time of a step."""
        return self._open is None or self._open.kind is StepKind.GRADIENTS

    def handle_task(self, task: TaskDone) -> None:
        """Record a finished task; ignore tasks of older steps."""
        if task.purpose is Purpose.SPECULATIVE:
            self.watch.lateness.count_copy()
        step = self._open
        if step is None or step.index != task.step:
            return
        step.note(task)
        if self.activity is Activity.REDO:
            self._redo_now()
        elif task.purpose is Purpose.SPECULATIVE and self.activity is Activity.ROWS:
            self.watch.late = ()
            self.advance()
            self._standing.order(effects.LookWhoIsLate(self._view.number, self.step))
        else:
            self.advance()

    def advance(self) -> None:
        """Do everything that can be done now."""
        self._continue_script()
        if self.activity is Activity.TASKS:
            self._begin_sums()
        if self.activity is Activity.SUM:
            self._share_rows()
        if self.activity is Activity.AUDITING:
            self._audit()

    def _continue_script(self) -> None:
        """Order the script's next task, if it computes none now."""
        step, standing = self._open, self._standing
        if step is None or step.index != self.step or self._following.is_fed_outside:
            return
        if self.activity in (Activity.TASKS, Activity.SUM, Activity.ROWS):
            self._audits.plan(self._view, self.step, self.owners, step.kind)
        if step.running is not None:
            return
        hosted = () if self._is_dropped() else standing.status.hosted
        standing.order(*(effects.Adopt(vrank) for vrank in step.adopt(hosted)))
        task = self._next_task(step, hosted)
        self.watch.record_idle(task is None or task[1] is Purpose.SPECULATIVE)
        if task is None:
            return
        vrank, purpose = step.running = task
        standing.order(self._audits.order(step.index, vrank, purpose))

    def _next_task(self, step: OpenStep, hosted: Sequence[int]) -> tuple[int, Purpose] | None:
        if missing := step.missing_tasks(hosted):
            return missing[0], Purpose.HOSTED
        if owed := self._audits.owed_vranks(self._standing.me, step):
            return owed[0], Purpose.AUDITED
        late = self.watch.choose_task(self.owners, self._view, step.speculative)
        return None if late is None else (late, Purpose.SPECULATIVE)

    def _is_dropped(self) -> bool:
        """Return whether what this member computes of the step does not count in this view."""
        return self.activity is not Activity.CLOSED and self._counted.drops(self.step)

    def handle_late_members(self, event: StillAwaited) -> None:
        """Copy the tasks that this worker would host without the late members."""
        if self.activity is Activity.ROWS and event.step == self.step:
            self.watch.late = tuple(self._view.workers[rank] for rank in event.ranks)
            self._continue_script()

    # ------------------------------------------------------------ members that count

    def _begin_sums(self) -> None:
        step = self._open
        if step is None or step.index != self.step:
            return
        counted = self._counted.settle(step)
        if counted is None:
            return
        if self._is_dropped():
            self._continue_script()  # the script skips dropped tasks
        self._go_to(Activity.SUM)
        self._standing.order(effects.Reduce(self._view.number, self.step, self.owners, counted))

    def handle_member_done(self, event: MemberDone) -> None:
        """Record, as the first member, that another has done all its tasks."""
        if self._counted.record_done(event):
            self.advance()

    def handle_count(self, event: CountSettled) -> None:
        """Take in the ranks whose results of a step count, as the first member has settled."""
        self._counted.record_settled(event)
        self.advance()

    def _share_rows(self) -> None:
        step = self._open
        hosted = self._standing.status.hosted
        if step is not None and (self._is_dropped() or not step.missing_tasks(hosted)):
            self._go_to(Activity.ROWS)
            self._standing.order(effects.ShareRows(self._view.number, self.step))

    # ------------------------------------------------------------ judging

    def handle_sums(self, event: Summed) -> None:
        """Compare states, then audited tasks, then the new sums, before the vote."""
        if self.activity is not Activity.ROWS or event.step != self.step:
            return
        self._sums, self.watch.late = event, ()
        self._go_to(Activity.AUDITING)
        workers = self._view.workers
        for prints in (event.parts, event.wholes, event.copies) if self._policy.cycle else ():
            taken = {workers[r]: p for r, p in enumerate(prints) if p or prints is event.parts}
            if len(set(taken.values())) > 1:
                self.judge_states(taken)
                return
        self._copies.feeding.record_copies(event.copies)
        self.advance()

    def _audit(self) -> None:
        """Send the results of audits, once this member owes none any more."""
        step = self._open
        if step is None or self._audits.owed_vranks(self._standing.me, step):
            return
        if not self._audits.planned:
            self._check_sums()
            return
        self._go_to(Activity.AUDIT)
        row = self._audits.row(step)
        self._standing.order(effects.Gather(self._view.number, Topic.AUDIT, row))

    def handle_gathered(self, event: Gathered) -> Verdict | None:
        """Take in the words of all members on a topic; return a verdict for the other machines."""
        match event.topic:
            case Topic.AGREE if self.activity is Activity.AGREE:
                return self._handle_agreement(event.rows)
            case Topic.AUDIT if self.activity is Activity.AUDIT:
                self._handle_audit(event.rows)
            case Topic.VOTE if self.activity is Activity.VOTE:
                return self._handle_votes(event.rows)
            case Topic.REPORT_FAULT if self.activity is Activity.REPORT_FAULT:
                self._go_to(Activity.CLOSED)
                return self._conclude(event.rows) or Failed("a worker is wrong")
        return None

    def _handle_audit(self, rows: Sequence[Row]) -> None:
        ruling = self._audits.rule(rows, self._view, self.owners)
        refused, refusal = self._newcomers.judge(self._view, ruling, self.owners)
        if refused:
            self._standing.carry(self._rulings.refuse(self.step, refused, refusal))
            if refusal is not Refusal.SCRIPT:
                self._leave(refused, diverged=refusal is Refusal.ANEW)
            return
        self._standing.carry(self._rulings.blame(self.step, ruling))
        match ruling.sentence:
            case Sentence.USE:
                self._check_sums()
            case Sentence.UNLIKE:
                self._tell(self._audits.ask_less())
                self._check_sums()
            case Sentence.SCRIPT:
                self._standing.carry(self._rulings.accuse_script(self.step))
            case Sentence.AGAIN:
                self._redo(ruling.audits)
            case Sentence.LEAVE:
                self._leave([w for w, _ in ruling.wrong], diverged=False)
            case Sentence.TIE:
                self._tell("the workers come to different gradients, " + NO_MAJORITY)
                self._leave([], diverged=False)

    def _check_sums(self) -> None:
        """A share of the buckets is summed twice, by different members."""
        assert self._sums is not None, "sums are checked before they are here"
        alone = len(self._view.members) == 1
        buckets = 0 if alone else self._sums.buckets
        self._to_check = self._audits.plan_sum_checks(self.step, buckets)
        self._go_to(Activity.CHECK_SUMS)
        self._check_next()

    def _check_next(self) -> None:
        if not self._to_check:
            self._accept()
            return
        hosts = [self._view.rank(owner) for owner in self.owners]
        self._trial = SumTrial(self._to_check.pop(0), hosts, len(self._view.members))
        self._standing.order(
            effects.CheckSum(self._view.number, self._trial.bucket, effects.COMPARE)
        )

    def handle_sum_check(self, event: SumChecked) -> None:
        """Take in the members' answers about a bucket's sum."""
        trial = self._trial
        if self.activity is not Activity.CHECK_SUMS or trial is None:
            return
        if trial.bucket != event.bucket:
            return
        trial.hear(event.rows)
        if trial.is_undecided:
            self._tell("the workers come to different sums, " + NO_MAJORITY)
            self._leave([], diverged=False)
        elif (question := trial.question) is None:
            wrong = [self._view.workers[rank] for rank in trial.wrong]
            if trial.right:
                self._standing.carry(self._rulings.record_wrong_sum(self.step, wrong))
            self._check_next()
        else:
            if trial.right:
                self._standing.order(effects.UseCorrectSum(trial.bucket, trial.right))
            self._standing.order(effects.CheckSum(self._view.number, trial.bucket, question))

    def _accept(self) -> None:
        """The sums are right, as far as was looked; perhaps they are not finite."""
        self._audits.record_sums()
        looked = [audit.vrank for audit in self._audits.planned]
        self._newcomers.add_audits(self._view, (w for a in self._audits.planned for w in a.workers))
        self._rulings.record_sums(self.step, self.owners, looked)
        doubted = self.doubt > Doubt.CONFIRMED_NON_FINITE
        self._standing.carry(self._report_contradictions())
        if not doubted and self._copies.replicating.is_active:
            self._go_to(Activity.KEEP)
            self._standing.order(effects.KeepStep(SinkKind.MEMORY, self._view.number, self.step))
        else:
            self._vote(is_believed=not doubted)

    def handle_kept_gradient(self, step: int, *, full: bool) -> None:
        """Continue to the vote, now that the gradient is in the nodes' memory."""
        if self.activity is Activity.KEEP and step == self.step:
            self._copies.replicating.full = full
            self._vote(is_believed=True)

    @property
    def doubt(self) -> int:
        """Return the vote's doubt about the sums: a `Doubt`, or BLAMED plus a rank."""
        sums, audits = self._sums, self._audits
        if sums is None:
            return Doubt.FINITE
        every = len(audits.planned) == len(self.owners)
        if sums.doubt != Doubt.FINITE:
            given_up = audits.alike is Alike.NOTHING
            believed = self._rulings.believes_not_finite(self.step, sums.bits)
            return Doubt.CONFIRMED_NON_FINITE if given_up or every or believed else sums.doubt
        compares = audits.alike is Alike.BITS and not every
        return Doubt.CONTRADICTED if sums.unlike and compares else Doubt.FINITE

    def _report_contradictions(self) -> list[effects.Outcome]:
        """Report speculative tasks whose bits differ from those of the tasks that they copy."""
        if self.doubt != Doubt.CONTRADICTED:
            return []
        sums = self._sums
        assert sums is not None, "only sums contradict a task"
        found = f"of step {self.step} came to other bits; the step is computed again"
        return [EventNoted("wrong", f"a copy of virtual rank {v} {found}") for v in sums.unlike]

    # ------------------------------------------------------------ the vote

    def _vote(self, *, is_believed: bool) -> None:
        """Vote on the step; `is_believed`: its gradient may be used."""
        self._go_to(Activity.VOTE)
        self._record_reduced(is_believed)
        standing, sums, copies = self._standing, self._sums, self._copies
        assert sums is not None, "a vote without sums"
        copies.record_step()
        leads, ends = standing.leads_now, standing.ends_saved
        save, busy = copies.saves.opinion(self.step, standing.now, leads=leads, ends=ends)
        vote = Vote(
            view=self._view.number,
            step=self.step,
            pending=standing.is_change_pending and not standing.ends_saved,
            save=save,
            busy=busy,
            alike=int(self._audits.alike),
            doubt=self.doubt,
            compute_us=0 if self._is_dropped() else sums.compute_us,
            wait=sums.wait,
            follow=copies.feeding.opinion(),
            protect=copies.replicating.opinion(self.step, standing.leads_now),
            staged=copies.replicating.staged,
        )
        standing.order(effects.Gather(self._view.number, Topic.VOTE, vote.row()))

    def _record_reduced(self, reduced: bool) -> None:
        """Record whether the complete gradient of the step is here and may be used."""
        if reduced != self._standing.status.reduced:
            self._standing.change(reduced=reduced)

    def _handle_votes(self, rows: Sequence[Row]) -> Verdict | None:
        standing = self._standing
        tally = self._counting.count(rows)
        if tally.alien:
            return Failed(f"votes of view {self._view.number}, step {self.step} do not match")
        if max(tally.doubts) > Doubt.CONFIRMED_NON_FINITE:
            suspects = [
                self._view.workers[d - Doubt.BLAMED] for d in tally.doubts if d >= Doubt.BLAMED
            ]
            self._rulings.record_doubt(self.step, suspects, self._sums.bits if self._sums else 0)
            self._redo(self._audits.audit_all(self._view, self.step, self.owners))
            return None
        standing.carry(
            self._rulings.settle(self.step, rightly=Doubt.CONFIRMED_NON_FINITE in tally.doubts)
        )
        whole_step = self.step + 1 if tally.save or tally.protect else self._audits.whole_step
        self._audits.agree(Alike(tally.alike), whole_step)
        self._copies.agree(self.step, self._view, tally)
        if self._view.suspended:
            standing.order(effects.KeepStep(SinkKind.LATE, self._view.number, self.step))
        if self.is_timed:
            standing.carry(self._counting.observe(tally, standing.leads_now))
        step, hosted = self._open, standing.status.hosted
        dropped = self._is_dropped() and step is not None and step.count_used(hosted) is None
        return Decided(self.step, tally.pending, self._counting.owners, dropped)

    def record_commit(self, owners: tuple[WorkerId, ...]) -> None:
        """Record that the step is committed, and begin the next one."""
        self.owners = owners
        self.is_proved = self._newcomers.record_commit(self._standing.me)
        if self.activity is Activity.VOTE:
            self._go_to(Activity.TASKS)

    # ------------------------------------------------------------ again, or not at all

    def _redo(self, audits: Sequence[Audit]) -> None:
        """Repeat the step, after the script has ended its present task."""
        self._again, self._sums = tuple(audits), None
        self._go_to(Activity.REDO)
        self._record_reduced(False)
        if self._open is None or self._open.running is None:
            self._redo_now()

    def _redo_now(self) -> None:
        step = self._open
        assert step is not None, "no step to compute again"
        step.restart()
        self._audits.plan_again(self._again)
        self._go_to(Activity.TASKS)
        self._standing.order(effects.Redo(self.step))
        self.advance()

    def judge_states(self, prints: dict[WorkerId, int]) -> None:
        """Judge that the states of these members are not all the same."""
        wrong, events = self._rulings.judge_states(self.step, prints)
        self._standing.carry(events)
        self._leave(wrong, diverged=True)

    def _leave(self, wrong: Sequence[WorkerId], *, diverged: bool) -> None:
        """Report a fault to all members, so that wrong ones leave; (): they are unknown."""
        self._go_to(Activity.REPORT_FAULT)
        row = self._rulings.report_fault(self.step, wrong, diverged=diverged)
        self._standing.order(effects.Gather(self._view.number, Topic.REPORT_FAULT, row))

    def _conclude(self, rows: Sequence[Row] | None) -> Doubted | None:
        """Carry out the conclusions from the words of all members; return doubts, if any."""
        doubted = None
        for outcome in self._rulings.conclude(self.step, rows):
            if isinstance(outcome, Doubted):
                doubted = outcome
            else:
                self._standing.carry([outcome])
        return doubted

    def _tell(self, text: str) -> None:
        self._standing.carry(self._rulings.tell(text))
