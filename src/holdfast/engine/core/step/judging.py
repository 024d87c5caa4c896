"""Judges a step's results before the vote: states, audited tasks, and the sums. Pure.

All members receive the same rows, so all judge alike: the sums may be used, the step is computed
again, or wrong workers leave. The last one ends the view: all report the fault first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.ground import effects
from holdfast.engine.core.ground.events import Doubt, EventNoted, Row, SumChecked, Summed, Topic
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.step.activities import Activity
from holdfast.engine.core.step.audit import Alike, Audit, Sentence
from holdfast.engine.core.step.audits import Audits
from holdfast.engine.core.step.course import Course
from holdfast.engine.core.step.newcomers import Newcomers, Refusal
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.step.sum_trial import SumTrial
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.types import WorkerId

NO_MAJORITY = "and none has a majority"


@dataclass(frozen=True, slots=True)
class Judged:
    """Reports that members can vote on the sums; `is_believed`: without a doubt of this member."""

    is_believed: bool


@dataclass(frozen=True, slots=True)
class Again:
    """Reports that the step is computed again, with these audits."""

    audits: tuple[Audit, ...]


#: None: an answer of all members is awaited, or the fault that ends the view is reported.
Judgement = Judged | Again | None


class Judging:
    """Judges one step after the other, together with the other members of the view."""

    def __init__(
        self,
        standing: Standing,
        course: Course,
        audits: Audits,
        rulings: Rulings,
        newcomers: Newcomers,
    ) -> None:
        #: The sums of the step to be committed next, once they are here.
        self.sums: Summed | None = None
        self._standing = standing
        self._course = course
        self._audits = audits
        self._rulings = rulings
        self._newcomers = newcomers
        self._to_check: list[int] = []  # buckets
        self._trial: SumTrial | None = None

    def forget(self) -> None:
        """Forget the sums: another view has begun, or the step is computed again."""
        self.sums, self._trial = None, None

    # ------------------------------------------------------------ states

    def compare_states(self, sums: Summed) -> bool:
        """Return whether the fingerprints that came with the sums agree; else report the fault."""
        workers = self._course.view.workers
        for prints in (sums.parts, sums.wholes, sums.copies):
            taken = {workers[r]: p for r, p in enumerate(prints) if p or prints is sums.parts}
            if len(set(taken.values())) > 1:
                self.judge_states(taken)
                return False
        return True

    def judge_states(self, prints: dict[WorkerId, int]) -> None:
        """Judge that the states of these members are not all the same."""
        wrong, events = self._rulings.judge_states(self._course.step, prints)
        self._standing.carry(events)
        self._report_fault(wrong, diverged=True)

    # ------------------------------------------------------------ audited tasks

    def audit(self, step: OpenStep | None) -> Judgement:
        """Send the results of audits, once this member owes none any more."""
        if step is None or self._audits.owed_vranks(self._standing.me, step):
            return None
        if not self._audits.planned:
            return self._check_sums()
        self._course.go_to(Activity.AUDIT)
        row = self._audits.row(step)
        self._standing.order(effects.Gather(self._course.view.number, Topic.AUDIT, row))
        return None

    def handle_audit(self, rows: Sequence[Row]) -> Judgement:
        """Judge the results of all members' audits, by rank."""
        course, standing = self._course, self._standing
        ruling = self._audits.rule(rows, course.view, course.owners)
        refused, refusal = self._newcomers.judge(course.view, ruling, course.owners)
        if refused:
            standing.carry(self._rulings.refuse(course.step, refused, refusal))
            if refusal is not Refusal.SCRIPT:
                self._report_fault(refused, diverged=refusal is Refusal.ANEW)
            return None
        standing.carry(self._rulings.blame(course.step, ruling))
        match ruling.sentence:
            case Sentence.USE:
                return self._check_sums()
            case Sentence.UNLIKE:
                self._log(self._audits.ask_less())
                return self._check_sums()
            case Sentence.SCRIPT:
                standing.carry(self._rulings.accuse_script(course.step))
            case Sentence.AGAIN:
                return Again(tuple(ruling.audits))
            case Sentence.LEAVE:
                self._report_fault([w for w, _ in ruling.wrong], diverged=False)
            case Sentence.TIE:
                self._log("the workers come to different gradients, " + NO_MAJORITY)
                self._report_fault([], diverged=False)
        return None

    # ------------------------------------------------------------ sums

    def _check_sums(self) -> Judgement:
        """A share of the buckets is summed twice, by different members."""
        assert self.sums is not None, "sums are checked before they are here"
        alone = len(self._course.view.members) == 1
        buckets = 0 if alone else self.sums.buckets
        self._to_check = self._audits.plan_sum_checks(self._course.step, buckets)
        self._course.go_to(Activity.CHECK_SUMS)
        return self._check_next()

    def _check_next(self) -> Judgement:
        if not self._to_check:
            return self._accept()
        view = self._course.view
        hosts = [view.rank(owner) for owner in self._course.owners]
        self._trial = SumTrial(self._to_check.pop(0), hosts, len(view.members))
        self._standing.order(effects.CheckSum(view.number, self._trial.bucket, effects.COMPARE))
        return None

    def handle_sum_check(self, event: SumChecked) -> Judgement:
        """Take in the members' answers about a bucket's sum."""
        course, trial = self._course, self._trial
        if course.activity is not Activity.CHECK_SUMS or trial is None:
            return None
        if trial.bucket != event.bucket:
            return None
        trial.hear(event.rows)
        if trial.is_undecided:
            self._log("the workers come to different sums, " + NO_MAJORITY)
            self._report_fault([], diverged=False)
        elif (question := trial.question) is None:
            wrong = [course.view.workers[rank] for rank in trial.wrong]
            if trial.right:
                self._standing.carry(self._rulings.record_wrong_sum(course.step, wrong))
            return self._check_next()
        else:
            if trial.right:
                self._standing.order(effects.UseCorrectSum(trial.bucket, trial.right))
            self._standing.order(effects.CheckSum(course.view.number, trial.bucket, question))
        return None

    def _accept(self) -> Judged:
        """The sums are right, as far as was looked; perhaps they are not finite."""
        course, planned = self._course, self._audits.planned
        self._audits.record_sums()
        self._newcomers.add_audits(course.view, (w for audit in planned for w in audit.workers))
        self._rulings.record_sums(course.step, course.owners, [audit.vrank for audit in planned])
        self._standing.carry(self._report_contradictions())
        return Judged(self.doubt <= Doubt.CONFIRMED_NON_FINITE)

    @property
    def doubt(self) -> int:
        """Return the vote's doubt about the sums: a `Doubt`, or BLAMED plus a rank."""
        sums, audits = self.sums, self._audits
        if sums is None:
            return Doubt.FINITE
        every = len(audits.planned) == len(self._course.owners)
        if sums.doubt != Doubt.FINITE:
            given_up = audits.alike is Alike.NOTHING
            believed = self._rulings.believes_not_finite(self._course.step, sums.bits)
            return Doubt.CONFIRMED_NON_FINITE if given_up or every or believed else sums.doubt
        compares = audits.alike is Alike.BITS and not every
        return Doubt.CONTRADICTED if sums.unlike and compares else Doubt.FINITE

    def _report_contradictions(self) -> list[effects.Outcome]:
        """Report speculative tasks whose bits differ from those of the tasks that they copy."""
        if self.doubt != Doubt.CONTRADICTED:
            return []
        assert self.sums is not None, "only sums contradict a task"
        found = f"of step {self._course.step} came to other bits; the step is computed again"
        unlike = self.sums.unlike
        return [EventNoted("wrong", f"a copy of virtual rank {v} {found}") for v in unlike]

    # ------------------------------------------------------------ faults that end the view

    def _report_fault(self, wrong: Sequence[WorkerId], *, diverged: bool) -> None:
        """Report a fault to all members, so that wrong ones leave; (): they are unknown."""
        self._course.go_to(Activity.REPORT_FAULT)
        row = self._rulings.report_fault(self._course.step, wrong, diverged=diverged)
        self._standing.order(effects.Gather(self._course.view.number, Topic.REPORT_FAULT, row))

    def conclude(self, rows: Sequence[Row] | None) -> Doubted | None:
        """Carry out the conclusions from all members' reports; None: some could not report."""
        doubted = None
        for outcome in self._rulings.conclude(self._course.step, rows):
            if isinstance(outcome, Doubted):
                doubted = outcome
            else:
                self._standing.carry([outcome])
        return doubted

    def _log(self, text: str) -> None:
        self._standing.carry(self._rulings.tell(text))
