"""Runs a member of a view from one step boundary to the next.

It decides what the script computes, when sums begin, whom to believe, when to compute again, what
to vote and what follows from the votes. It does not know membership: what changes that, or the
worker's status, is handed to the worker machine as a decision. The invariant it keeps: a member
votes only for sums that all members have judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.core.step.activities import STEPPING, Activity
from holdfast.core.step.audit import Alike, Audit, Sentence
from holdfast.core.step.audits import Audits
from holdfast.core.step.backup import FIRST, Settlement
from holdfast.core.step.balance import BalancePolicy
from holdfast.core.step.effects import (
    Adopt,
    BecameBased,
    BecameIdle,
    BecameReduced,
    BecameSynced,
    CheckSum,
    Compute,
    Decided,
    Failed,
    ForgetMissed,
    Gather,
    KeepGradient,
    KeepStep,
    LookWhoIsLate,
    Outcome,
    PutRight,
    RecallState,
    RecallStep,
    ReceiveMissed,
    Redo,
    Reduce,
    Restore,
    SendCounted,
    SendDone,
    SendMissed,
    ShareRows,
    SyncState,
    Withdraw,
)
from holdfast.core.step.events import (
    CONTRADICTED,
    FINITE,
    RIGHTLY,
    SOMEBODYS,
    CountSettled,
    EventNoted,
    Gathered,
    MemberDone,
    Purpose,
    Row,
    StatesCompared,
    StepKind,
    StepOpened,
    StillAwaited,
    SumChecked,
    Summed,
    TaskDone,
    Topic,
)
from holdfast.core.step.feeding import Feeding
from holdfast.core.step.newcomers import Newcomers, Refusal
from holdfast.core.step.open_step import OpenStep
from holdfast.core.step.protecting import Protecting
from holdfast.core.step.rulings import Rulings
from holdfast.core.step.saves import Saves
from holdfast.core.step.speculation import worth_copying
from holdfast.core.step.step_policy import Counting, StepPolicy, Surroundings
from holdfast.core.step.sum_trial import SumTrial
from holdfast.core.step.vote import Vote
from holdfast.core.types import View, WorkerId

EQUAL = "and none has a majority"


class StepMachine:
    """Runs a member's steps, as the module describes. What changes it returns outcomes in order."""

    def __init__(
        self,
        me: WorkerId,
        policy: StepPolicy,
        around: Surroundings,
        counting: Callable[[View, BalancePolicy | None], Counting] = Counting,
    ) -> None:
        self.saves = Saves(policy.saves, me)
        self.feeding = Feeding()
        self.protecting = Protecting(policy.protect_every)
        self.activity = Activity.CLOSED
        self.step = 0  # the one to be committed next
        self.owners: tuple[WorkerId, ...] = ()  # in that step
        self.hosted: tuple[int, ...] = ()  # by this worker
        self.is_proved = False  # in this view it has committed tasks that others computed, too
        self._me = me
        self._policy = policy
        self._around = around
        self._make_counting = counting
        self._newcomers = Newcomers(looks=policy.cycle > 0)
        self._audits = Audits(policy.seed, policy.audit, policy.audit_tolerance, self._newcomers)
        self._rulings = Rulings(me, policy.cycle, keeps=policy.keeps, looks=policy.looks)
        self._view: View
        self._rank = 0
        self._counting: Counting
        self._open: OpenStep | None = None
        self._idle = False
        self._settlement: Settlement | None = None
        self._again: tuple[Audit, ...] = ()  # of the next attempt at the step
        self._sums: Summed | None = None
        self._to_check: list[int] = []  # buckets
        self._trial: SumTrial | None = None
        self._late: tuple[WorkerId, ...] = ()  # whose tasks may be copied
        self._withdrawn: object = ()

    # ------------------------------------------------------------ views

    def enter(self, view: View, step: int, hosted: tuple[int, ...], now: float) -> list[Outcome]:
        """A view is installed; what this worker hosts in it may be computed at once."""
        self._view, self._rank = view, view.rank(self._me)
        self.activity = Activity.CONNECT
        self.step, self.owners, self.hosted = step, view.owners, hosted
        if self._open is not None and self._open.index != step:
            self._open = None
        self._sums, self._trial, self._late = None, None, ()
        if self._policy.backup.workers:
            self._settlement = Settlement(self._policy.backup, self._rank, len(view.members))
        self._audits.enter()
        self._rulings.enter(view)
        self.saves.enter(view, now)
        self.saves.left(step)
        self.protecting.enter(view)
        return self._script()

    def close(self) -> list[Outcome]:
        """The view is given up; who was about to confess says what it knows."""
        confessing, self.activity = self.activity is Activity.CONFESS, Activity.CLOSED
        self._late = ()
        return self._rulings.conclude(self.step, None) if confessing else []

    def connected(self) -> list[Outcome]:
        """All members are connected: joiners and late ones are brought up to date first."""
        view = self._view
        out: list[Outcome] = []
        if self._policy.keeps and self._rank == FIRST and view.invalidations != self._withdrawn:
            self._withdrawn = view.invalidations
            out.append(Withdraw(view.invalidations))
        if not view.joiners or view.fed:
            return [*out, *self._agree()]
        if not view.donors and view.base:
            self.activity = Activity.RESTORE
            if view.recall is not None and view.recall.view:
                return [*out, RecallState(view.number, view.recall)]
            return [*out, Restore(view.number, view.base)]
        return [*out, *self.restored()]

    def restored(self) -> list[Outcome]:
        """The members that hold the state have it; late ones are sent what they have missed."""
        view = self._view
        if view.late_worker(self._me) is not None:
            self.activity = Activity.CATCH_UP
            self.step = self.step if view.recall is None else view.base
            return [] if view.recall is None else [BecameBased(view.base)]
        donates = self._me not in view.joiners
        sends = [SendMissed(view.number, lag) for lag in view.catching_up] if donates else []
        self.activity = Activity.COMPARE
        return [*sends, SyncState(view.number)]

    def catch_up(self) -> list[Outcome]:
        """Receive the next missed step once the script waits for it."""
        if self.activity is not Activity.CATCH_UP:
            return []
        view = self._view
        if view.feeds(self._me):  # it has been fed what it takes, or will be
            return [] if self.step < view.resume_step else self._synced()
        waits = self._open is not None and self._open.index == self.step and self._idle
        if self.step < view.resume_step:
            if not waits:
                return []
            self.activity = Activity.RECEIVE
            order = ReceiveMissed if view.recall is None else RecallStep
            return [order(view.number, self.step)]
        # What is recalled may end between steps with no boundary: nothing of the next is done.
        if not self._around.at_rest and (view.recall is None or not waits):
            return []
        self.activity = Activity.COMPARE
        return [SyncState(view.number)]

    def missed_heard(self) -> None:
        """A missed step is here, and is committed."""
        self.activity = Activity.CATCH_UP

    def compared(self, event: StatesCompared) -> list[Outcome]:
        """The joiners have the state, if all who held it already hold the same."""
        if self.activity is not Activity.COMPARE:
            return []
        if event.prints:
            return self._differ(dict(event.prints))
        return self._agree()

    def _agree(self) -> list[Outcome]:
        """A joiner does not know what the others have agreed on, nor who has missed a vote."""
        self.activity = Activity.AGREE
        row = (int(self._audits.alike), self._audits.whole_step)
        return [ForgetMissed(self._view.number), Gather(self._view.number, Topic.AGREE, row)]

    def _agreed(self, rows: Sequence[Row]) -> list[Outcome]:
        view, audits = self._view, self._audits
        alike = Alike(int(max(row[0] for row in rows)))
        if self._policy.backup.workers:
            alike = Alike.NOTHING  # what is dropped cannot be compared
        audits.agree(alike, int(max(row[1] for row in rows)))
        self._counting = self._make_counting(view, self._policy.balance)
        self._rulings.synced(compared=bool(view.joiners) and not view.fed)
        if view.feeds(self._me) and self.step < view.resume_step:
            self.activity = Activity.CATCH_UP
            return []
        return self._synced()

    def _synced(self) -> list[Outcome]:
        self.activity = Activity.TASKS
        return [BecameSynced()]

    def synced(self, step: int, hosted: tuple[int, ...]) -> list[Outcome]:
        """Begin the steps: all members hold the state after `step` of them."""
        self.step, self.hosted = step, hosted
        return self.advance()

    @property
    def is_synced(self) -> bool:
        """Tell whether the view has come to its steps."""
        return self.activity in STEPPING

    # ------------------------------------------------------------ the script

    def opened(self, event: StepOpened) -> list[Outcome]:
        """The script is ready to compute tasks of a step."""
        if not event.rested:
            self.saves.postpone(event.step)
            self.protecting.postpone(event.step)
            self._audits.postpone(event.step)
        self._open, self._idle = OpenStep(event.step, event.kind), False
        return self.advance()

    @property
    def is_timed(self) -> bool:
        """Tell whether the open step says anything about how long steps take."""
        return self._open is None or self._open.kind is StepKind.GRADIENTS

    def task_done(self, task: TaskDone) -> list[Outcome]:
        """The script has computed a task; of an older step it does not matter any more."""
        step = self._open
        if step is None or step.index != task.step:
            return []
        step.note(task)
        if self.activity is Activity.REDO:
            return self._redo_now()
        if task.purpose is Purpose.SPECULATIVE and self.activity is Activity.ROWS:
            self._late = ()  # who is still late is looked at anew
            return [*self.advance(), LookWhoIsLate(self._view.number, self.step)]
        return self.advance()

    def awaited(self, event: StillAwaited) -> list[Outcome]:
        """Members are late, and this worker may compute what it would host without them."""
        if self.activity is not Activity.ROWS or event.step != self.step:
            return []
        self._late = tuple(self._view.workers[rank] for rank in event.ranks)
        return self._script()

    def advance(self) -> list[Outcome]:
        """Do whatever can be done now."""
        out = self._script()
        if self.activity is Activity.TASKS:
            out += self._begin_sums()
        if self.activity is Activity.SUM:
            out += self._share_rows()
        if self.activity is Activity.OWED:
            out += self._audit()
        return out

    def _script(self) -> list[Outcome]:
        """Have the script compute what comes next, if it computes nothing now."""
        step = self._open
        if step is None or step.index != self.step:
            return []
        if self.activity in (Activity.TASKS, Activity.SUM, Activity.ROWS):
            self._audits.plan(self._view, self.step, self.owners, step.kind)
        if step.running is not None:
            return []
        hosted = () if self._drops() else self.hosted
        out: list[Outcome] = [Adopt(vrank) for vrank in step.adopt(hosted)]
        task = self._next_task(step, hosted)
        if (task is None or task[1] is Purpose.SPECULATIVE) and not self._idle:
            self._idle = True
            out.append(BecameIdle(True))
        if task is None:
            return out
        vrank, purpose = task
        if purpose is not Purpose.SPECULATIVE and self._idle:
            self._idle = False
            out.append(BecameIdle(False))
        step.running = task
        digest, near = self._audits.wants_digest(vrank), self._audits.alike is Alike.NEAR
        return [*out, Compute(step.index, vrank, purpose, digest, near)]

    def _next_task(self, step: OpenStep, hosted: Sequence[int]) -> tuple[int, Purpose] | None:
        if missing := step.missing(hosted):
            return missing[0], Purpose.HOSTED
        if owed := self._audits.owed(self._me, step):
            return owed[0], Purpose.AUDITED
        if not self._late:
            return None
        tasks = worth_copying(self.owners, self._view.workers, self._late, self._me)
        late = [vrank for vrank in tasks if vrank not in step.speculative]
        return (late[0], Purpose.SPECULATIVE) if late else None

    def _drops(self) -> bool:
        """Tell whether what this member computes of the step does not count in this view."""
        if self._settlement is None or self.activity is Activity.CLOSED:
            return False
        return self._settlement.drops(self.step)

    # ------------------------------------------------------------ who counts

    def _begin_sums(self) -> list[Outcome]:
        step, settlement = self._open, self._settlement
        if step is None or step.index != self.step:
            return []
        out: list[Outcome] = []
        counted: Sequence[int] = range(len(self._view.members))
        if settlement is not None and step.kind is StepKind.GRADIENTS:
            settlement.begin(self.step)
            used = step.used(self.hosted)
            if used is not None and settlement.says_done(self.step):
                out += self._say_done(used)
            found = settlement.counted(self.step)
            if found is None:
                return out
            counted = found
            out += self._script()  # what is dropped is not computed
        self.activity = Activity.SUM
        return [*out, Reduce(self._view.number, self.step, self.owners, counted)]

    def _say_done(self, used: int) -> list[Outcome]:
        if self._rank != FIRST:
            return [SendDone(self._view.number, self.step, used)]
        return self.member_done(MemberDone(self._view.number, FIRST, self.step, used))

    def member_done(self, event: MemberDone) -> list[Outcome]:
        """Hear, as the first member, that another is done with all its tasks, perhaps too late."""
        if self._settlement is None:
            return []
        counted = self._settlement.heard(event.rank, event.step, event.samples)
        sends: list[Outcome] = []
        if counted and len(self._view.members) > 1:
            sends.append(SendCounted(self._view.number, event.step, counted))
        return sends if event.rank == FIRST else [*sends, *self.advance()]

    def count_settled(self, event: CountSettled) -> list[Outcome]:
        """The first member has said whose results of a step count."""
        if self._settlement is not None:
            self._settlement.settled(event.step, event.ranks)
        return self.advance()

    def _share_rows(self) -> list[Outcome]:
        step = self._open
        ready = step is not None and (self._drops() or not step.missing(self.hosted))
        if not ready:
            return []
        self.activity = Activity.ROWS
        return [ShareRows(self._view.number, self.step)]

    # ------------------------------------------------------------ judging

    def summed(self, event: Summed) -> list[Outcome]:
        """All is summed: compare states, then what was audited, then sums, before the vote."""
        if self.activity is not Activity.ROWS or event.step != self.step:
            return []
        self._sums, self.activity, self._late = event, Activity.OWED, ()
        workers = self._view.workers
        for prints in (event.parts, event.wholes, event.copies) if self._policy.cycle else ():
            taken = {workers[r]: p for r, p in enumerate(prints) if p or prints is event.parts}
            if len(set(taken.values())) > 1:
                return self._differ(taken)
        self.feeding.copies_agree(event.copies)
        return self.advance()

    def _audit(self) -> list[Outcome]:
        """Tell what was audited, once this member owes nothing any more."""
        step = self._open
        if step is None or self._audits.owed(self._me, step):
            return []
        if not self._audits.planned:
            return self._check_sums()
        self.activity = Activity.AUDIT
        return [Gather(self._view.number, Topic.AUDIT, self._audits.row(step))]

    def gathered(self, event: Gathered) -> list[Outcome]:
        """Go on with what all members have said of one topic."""
        match event.topic:
            case Topic.AGREE if self.activity is Activity.AGREE:
                return self._agreed(event.rows)
            case Topic.AUDIT if self.activity is Activity.AUDIT:
                return self._audited(event.rows)
            case Topic.VOTE if self.activity is Activity.VOTE:
                return self._voted(event.rows)
            case Topic.CONFESS if self.activity is Activity.CONFESS:
                self.activity = Activity.CLOSED
                out = self._rulings.conclude(self.step, event.rows)
                return [*out, Failed("a worker is wrong")]
        return []

    def _audited(self, rows: Sequence[Row]) -> list[Outcome]:
        ruling = self._audits.rule(rows, self._view, self.owners)
        refused, refusal = self._newcomers.judge(self._view, ruling, self.owners)
        if refused:
            told = self._rulings.refuse(self.step, refused, refusal)
            if refusal is Refusal.SCRIPT:
                return told
            return [*told, *self._leave(refused, diverged=refusal is Refusal.ANEW)]
        blamed = self._rulings.blame(self.step, ruling.wrong, ruling.sentence is Sentence.LEAVE)
        match ruling.sentence:
            case Sentence.USE:
                return [*blamed, *self._check_sums()]
            case Sentence.UNLIKE:
                told = self._rulings.tell(self._audits.ask_less())
                return [*told, *self._check_sums()]
            case Sentence.AGAIN:
                return self._redo(ruling.audits)
            case Sentence.LEAVE:
                return [*blamed, *self._leave([w for w, _ in ruling.wrong], diverged=False)]
            case Sentence.TIE:
                told = self._rulings.tell("the workers come to different gradients, " + EQUAL)
                return [*told, *self._leave([], diverged=False)]

    def _check_sums(self) -> list[Outcome]:
        """A share of the buckets is summed twice, by different members."""
        assert self._sums is not None, "sums are checked before they are here"
        buckets = self._sums.buckets
        alone = len(self._view.members) == 1
        self._to_check = [] if alone else list(self._audits.sums(self.step, buckets))
        self.activity = Activity.CHECK_SUMS
        return self._check_next()

    def _check_next(self) -> list[Outcome]:
        if not self._to_check:
            return self._accepted()
        self._trial = SumTrial(self._to_check.pop(0))
        return [CheckSum(self._view.number, self._trial.bucket, 0)]

    def sum_checked(self, event: SumChecked) -> list[Outcome]:
        """One more run of a bucket's sum was compared."""
        trial = self._trial
        if self.activity is not Activity.CHECK_SUMS or trial is None:
            return []
        if trial.bucket != event.bucket:
            return []
        verdict = trial.hear(event.digests)
        if verdict is None:
            return [CheckSum(self._view.number, trial.bucket, len(trial.tables))]
        if verdict.undecided:
            told = self._rulings.tell("the workers come to different sums, " + EQUAL)
            return [*told, *self._leave([], diverged=False)]
        out: list[Outcome] = [PutRight(trial.bucket, verdict.right)] if verdict.amended else []
        wrong = [self._view.workers[rank] for rank in verdict.wrong]
        return [*out, *self._rulings.summed_wrongly(self.step, wrong), *self._check_next()]

    def _accepted(self) -> list[Outcome]:
        """The sums are right, as far as was looked; perhaps they are not finite."""
        self._audits.accepted()
        looked = [audit.vrank for audit in self._audits.planned]
        self._newcomers.accepted(self._view, (w for a in self._audits.planned for w in a.workers))
        self._rulings.summed(self.step, self.owners, looked)
        doubted = self.doubt > RIGHTLY
        if not doubted and self.protecting.active:
            self.activity = Activity.KEEP
            return [*self._contradicted(), KeepGradient(self._view.number, self.step)]
        self.activity = Activity.VOTE
        return [*self._contradicted(), BecameReduced(not doubted), self._vote()]

    def gradient_kept(self, step: int, *, full: bool) -> list[Outcome]:
        """The gradient is in the nodes' memory: now it may be committed."""
        if self.activity is not Activity.KEEP or step != self.step:
            return []
        self.protecting.full = full
        self.activity = Activity.VOTE
        return [BecameReduced(True), self._vote()]

    @property
    def doubt(self) -> int:
        """Return what the vote says of the sums: finite, rightly not, or whose part is not."""
        sums, audits = self._sums, self._audits
        if sums is None:
            return FINITE
        every = len(audits.planned) == len(self.owners)
        if sums.doubt != FINITE:
            given_up = audits.alike is Alike.NOTHING
            believed = self._rulings.believes_not_finite(self.step, sums.bits)
            return RIGHTLY if given_up or every or believed else sums.doubt
        compares = audits.alike is Alike.BITS and not every
        return CONTRADICTED if sums.unlike and compares else FINITE

    def _contradicted(self) -> list[Outcome]:
        """Tell that speculative tasks came to other bits than the tasks that they copy."""
        if self.doubt != CONTRADICTED:
            return []
        sums = self._sums
        assert sums is not None, "only sums contradict a task"
        found = f"of step {self.step} came to other bits; the step is computed again"
        return [EventNoted("wrong", f"a copy of virtual rank {v} {found}") for v in sums.unlike]

    # ------------------------------------------------------------ the vote

    def _vote(self) -> Gather:
        """Say what this member thinks of the step."""
        around, sums = self._around, self._sums
        assert sums is not None, "a vote without sums"
        save, busy = self.saves.opinion(self.step, around.now, around.leads_now)
        vote = Vote(
            view=self._view.number,
            step=self.step,
            pending=around.pending,
            save=save,
            busy=busy,
            alike=int(self._audits.alike),
            doubt=self.doubt,
            compute_us=0 if self._drops() else sums.compute_us,
            wait=sums.wait,
            follow=self.feeding.opinion(),
            protect=self.protecting.opinion(self.step, around.leads_now),
            staged=self.protecting.staged,
        )
        return Gather(self._view.number, Topic.VOTE, vote.row())

    def _voted(self, rows: Sequence[Row]) -> list[Outcome]:
        tally = self._counting.count(rows)
        if tally.alien:
            return [Failed(f"votes of view {self._view.number}, step {self.step} do not match")]
        if max(tally.doubts) > RIGHTLY:
            suspects = [self._view.workers[d - SOMEBODYS] for d in tally.doubts if d >= SOMEBODYS]
            self._rulings.doubted(self.step, suspects, self._sums.bits if self._sums else 0)
            return self._redo(self._audits.all_twice(self._view, self.step, self.owners))
        out = self._rulings.settled(self.step, rightly=RIGHTLY in tally.doubts)
        whole_step = self.step + 1 if tally.save or tally.protect else self._audits.whole_step
        self._audits.agree(Alike(tally.alike), whole_step)
        if tally.save:
            self.saves.agree(self.step + 1, self._view, tally.save)
        # What is older goes once the commit is marked, which makes what is newer count.
        forget = self.protecting.voted(self.step, tally, self._around.now)
        out += self.feeding.committed(self.step)
        self.feeding.agree(tally.follow, self.step + 1)
        out += [KeepStep(self.step)] if self._view.suspended else []
        step = self._open
        if self.is_timed:
            events = self._counting.observe(tally, self._around.leads_now)
            out += [EventNoted(kind, text) for kind, text in events]
        dropped = self._drops() and step is not None and step.used(self.hosted) is None
        return [*out, Decided(self.step, tally.pending, self._counting.owners, dropped), *forget]

    def committed(self, owners: tuple[WorkerId, ...], hosted: tuple[int, ...]) -> None:
        """The step is committed, and the next one begins."""
        self.step += 1
        self.owners, self.hosted = owners, hosted
        self.is_proved = self._newcomers.committed(self._me)
        if self.activity is Activity.VOTE:
            self.activity = Activity.TASKS

    # ------------------------------------------------------------ again, or not at all

    def _redo(self, audits: Sequence[Audit]) -> list[Outcome]:
        """Have the step computed once more, after the script has ended what it computes now."""
        self._again, self.activity, self._sums = tuple(audits), Activity.REDO, None
        if self._open is not None and self._open.running is not None:
            return [BecameReduced(False)]
        return [BecameReduced(False), *self._redo_now()]

    def _redo_now(self) -> list[Outcome]:
        step = self._open
        assert step is not None, "no step to compute again"
        step.restart()
        self._audits.plan_again(self._again)
        self.activity = Activity.TASKS
        return [Redo(self.step), *self.advance()]

    def _differ(self, prints: dict[WorkerId, int]) -> list[Outcome]:
        """The states of these members are not all the same."""
        wrong, out = self._rulings.differ(self.step, prints)
        return [*out, *self._leave(wrong, diverged=True)]

    def _leave(self, wrong: Sequence[WorkerId], *, diverged: bool) -> list[Outcome]:
        """Have those who are wrong leave, once all have heard so; () if nobody knows who it is."""
        self.activity = Activity.CONFESS
        row = self._rulings.confess(self.step, wrong, diverged=diverged)
        return [Gather(self._view.number, Topic.CONFESS, row)]
