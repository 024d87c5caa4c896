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
from holdfast.engine.core.ground.ends import SinkKind
from holdfast.engine.core.ground.events import (
    CONTRADICTED,
    FINITE,
    FIRST,
    RIGHTLY,
    SOMEBODYS,
    CountSettled,
    EventNoted,
    Gathered,
    MemberDone,
    Purpose,
    Row,
    StepKind,
    StepOpened,
    StillAwaited,
    SumChecked,
    Summed,
    TaskDone,
    Topic,
)
from holdfast.engine.core.ground.standing import FOREVER, Standing
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.replica.replica import Replica
from holdfast.engine.core.step.activities import ACTIVITY_MOVES, STEPPING, SUMMED, Activity
from holdfast.engine.core.step.audit import Alike, Audit, Sentence
from holdfast.engine.core.step.audits import Audits
from holdfast.engine.core.step.backup import Settlement
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.newcomers import Newcomers, Refusal
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.step.speculation import Lateness, choose_copies
from holdfast.engine.core.step.step_policy import Counting, StepPolicy
from holdfast.engine.core.step.sum_trial import SumTrial
from holdfast.engine.core.step.verdicts import Agreed, Decided, Doubted, Failed, Verdict
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase

NO_MAJORITY = "and none has a majority"


class StepMachine:
    """Runs a member's steps, as the module describes. What changes it returns outcomes in order."""

    def __init__(
        self,
        standing: Standing,
        policy: StepPolicy,
        replica: Replica,
        counting: Callable[[View, BalancePolicy | None], Counting] = Counting,
    ) -> None:
        self._activity = Activity.CLOSED
        self.owners: tuple[WorkerId, ...] = ()  # the hosts of the virtual ranks in that step
        self.is_proved = False  # in this view it has committed tasks that others computed, too
        self.lateness = Lateness(policy.patience)
        self._me = standing.me
        self._standing = standing
        self._policy = policy
        self._replica = replica
        self._make_counting = counting
        self._newcomers = Newcomers(looks=policy.cycle > 0)
        audits = policy.seed, policy.audit, policy.audit_tolerance
        self._audits = Audits(*audits, self._newcomers, policy.script_cycle)
        self._rulings = Rulings(self._me, policy.cycle, keeps=policy.keeps, looks=policy.looks)
        self._view: View
        self._rank = 0
        self._counting: Counting
        self._open: OpenStep | None = None
        self._idle = False
        self._settlement: Settlement | None = None
        self._again: tuple[Audit, ...] = ()  # to be computed in the next attempt at the step
        self._sums: Summed | None = None
        self._to_check: list[int] = []  # buckets
        self._trial: SumTrial | None = None
        self._late: tuple[WorkerId, ...] = ()  # members whose tasks may be copied
        self._looked_in = -1  # the step in which it looked for late members

    # ------------------------------------------------------------ views

    def enter(self, view: View) -> None:
        """A view is installed; what this worker hosts in it may be computed at once."""
        self._view, self._rank = view, view.rank(self._me)
        self._go_to(Activity.SYNC)
        self.owners = view.owners
        if self._open is not None and self._open.index != self.step:
            self._open = None
        self._sums, self._trial, self._late = None, None, ()
        if self._policy.backup.workers:
            self._settlement = Settlement(self._policy.backup, self._rank, len(view.members))
        self._audits.enter()
        self._rulings.enter(view)
        self._continue_script()

    def close(self) -> Doubted | None:
        """Give the view up; return the doubts of a member that was about to confess."""
        confessing = self.activity is Activity.CONFESS
        self._go_to(Activity.CLOSED)
        self._late = ()
        return self._conclude(None) if confessing else None

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
        """Return what the members of the view do now, as far as this one knows."""
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
        """Let the script compute tasks of the step that it is ready for."""
        if not event.rested:
            self._replica.saves.postpone(event.step)
            self._replica.replicating.postpone(event.step)
            self._audits.postpone(event.step)
        self._open, self._idle = OpenStep(event.step, event.kind), False
        self.advance()

    @property
    def is_timed(self) -> bool:
        """Return whether the open step says anything about how long steps take."""
        return self._open is None or self._open.kind is StepKind.GRADIENTS

    def handle_task(self, task: TaskDone) -> None:
        """Record a finished task; ignore tasks of older steps."""
        if task.purpose is Purpose.SPECULATIVE:
            self.lateness.count_copy()
        step = self._open
        if step is None or step.index != task.step:
            return
        step.note(task)
        if self.activity is Activity.REDO:
            self._redo_now()
        elif task.purpose is Purpose.SPECULATIVE and self.activity is Activity.ROWS:
            self._late = ()  # look again for late members
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
        """Have the script compute the next task, if it computes nothing now."""
        step, standing = self._open, self._standing
        if step is None or step.index != self.step or self._replica.is_fed_outside:
            return
        if self.activity in (Activity.TASKS, Activity.SUM, Activity.ROWS):
            self._audits.plan(self._view, self.step, self.owners, step.kind)
        if step.running is not None:
            return
        hosted = () if self._is_dropped() else standing.status.hosted
        standing.order(*(effects.Adopt(vrank) for vrank in step.adopt(hosted)))
        task = self._next_task(step, hosted)
        if task is None or task[1] is Purpose.SPECULATIVE:
            self._become_idle(True)
        else:
            self._become_idle(False)
        if task is None:
            return
        vrank, purpose = step.running = task
        standing.order(self._audits.order(step.index, vrank, purpose))

    def _become_idle(self, idle: bool) -> None:
        if idle != self._idle:
            self._idle = idle
            self._say_idle(idle)

    def _say_idle(self, idle: bool) -> None:
        """Record whether the script waits for others from now on."""
        self._standing.change(phase=Phase.WAITING if idle else Phase.COMPUTING)
        self.lateness.record_done(self._standing.now)
        self._looked_in = -1
        if not self._standing.acts:
            self._standing.tell()

    def _next_task(self, step: OpenStep, hosted: Sequence[int]) -> tuple[int, Purpose] | None:
        if missing := step.missing_tasks(hosted):
            return missing[0], Purpose.HOSTED
        if owed := self._audits.owed_vranks(self._me, step):
            return owed[0], Purpose.AUDITED
        if not self._late:
            return None
        tasks = choose_copies(self.owners, self._view.paths, self._late, self._me)
        late = [vrank for vrank in tasks if vrank not in step.speculative]
        return (late[0], Purpose.SPECULATIVE) if late else None

    def _is_dropped(self) -> bool:
        """Return whether what this member computes of the step does not count in this view."""
        if self._settlement is None or self.activity is Activity.CLOSED:
            return False
        return self._settlement.drops(self.step)

    # ------------------------------------------------------------ members that are late

    def handle_late_members(self, event: StillAwaited) -> None:
        """Copy the tasks that this worker would host without the late members."""
        if self.activity is Activity.ROWS and event.step == self.step:
            self._late = tuple(self._view.workers[rank] for rank in event.ranks)
            self._continue_script()

    def look(self, now: float) -> None:
        """Look for late members, or report that some are late, once it is time."""
        standing = self._standing
        if now >= self.look_at():
            self._looked_in = standing.status.committed
            standing.order(effects.LookWhoIsLate(standing.status.view, standing.status.committed))
        if now >= self.late_at():
            standing.change(phase=Phase.OVERDUE)
            standing.tell()

    def look_again(self) -> None:
        """Look for members that are late in the step under way, though that was done before."""
        self._looked_in = -1

    def late_at(self) -> float:
        """Return when it says that others are late, if nothing happens until then."""
        waits = self._standing.status.phase is Phase.WAITING and self.is_timed
        return self.lateness.late_at if waits else FOREVER

    def look_at(self) -> float:
        """Return when its script may copy tasks of late members."""
        waits = self._standing.status.waiting and self.is_synced and self.is_timed
        return self.lateness.copy_at if waits and self._looked_in < 0 else FOREVER

    # ------------------------------------------------------------ members that count

    def _begin_sums(self) -> None:
        step, settlement = self._open, self._settlement
        if step is None or step.index != self.step:
            return
        counted: Sequence[int] = range(len(self._view.members))
        if settlement is not None and step.kind is StepKind.GRADIENTS:
            settlement.begin(self.step)
            used = step.count_used(self._standing.status.hosted)
            if used is not None and settlement.record_own_done(self.step):
                self._say_done(used)
            found = settlement.counted_ranks(self.step)
            if found is None:
                return
            counted = found
            self._continue_script()  # the script skips dropped tasks
        self._go_to(Activity.SUM)
        self._standing.order(effects.Reduce(self._view.number, self.step, self.owners, counted))

    def _say_done(self, used: int) -> None:
        number = self._view.number
        if self._rank == FIRST:
            self.handle_member_done(MemberDone(number, FIRST, self.step, used))
        else:
            self._standing.order(effects.SendDone(number, self.step, used))

    def handle_member_done(self, event: MemberDone) -> None:
        """Hear, as the first member, that another is done with all its tasks, perhaps too late."""
        if self._settlement is None:
            return
        counted = self._settlement.record_done(event.rank, event.step, event.samples)
        if counted and len(self._view.members) > 1:
            self._standing.order(effects.SendCounted(self._view.number, event.step, counted))
        if event.rank != FIRST:
            self.advance()

    def handle_count(self, event: CountSettled) -> None:
        """Take in whose results of a step count, as the first member says."""
        if self._settlement is not None:
            self._settlement.record_settled(event.step, event.ranks)
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
        self._sums, self._late = event, ()
        self._go_to(Activity.AUDITING)
        workers = self._view.workers
        for prints in (event.parts, event.wholes, event.copies) if self._policy.cycle else ():
            taken = {workers[r]: p for r, p in enumerate(prints) if p or prints is event.parts}
            if len(set(taken.values())) > 1:
                self.judge_states(taken)
                return
        self._replica.feeding.record_copies(event.copies)
        self.advance()

    def _audit(self) -> None:
        """Send the results of audits, once this member owes nothing any more."""
        step = self._open
        if step is None or self._audits.owed_vranks(self._me, step):
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
            case Topic.CONFESS if self.activity is Activity.CONFESS:
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
                self._standing.order(effects.PutRight(trial.bucket, trial.right))
            self._standing.order(effects.CheckSum(self._view.number, trial.bucket, question))

    def _accept(self) -> None:
        """The sums are right, as far as was looked; perhaps they are not finite."""
        self._audits.record_sums()
        looked = [audit.vrank for audit in self._audits.planned]
        self._newcomers.add_audits(self._view, (w for a in self._audits.planned for w in a.workers))
        self._rulings.record_sums(self.step, self.owners, looked)
        doubted = self.doubt > RIGHTLY
        self._standing.carry(self._report_contradictions())
        if not doubted and self._replica.replicating.is_active:
            self._go_to(Activity.KEEP)
            self._standing.order(effects.KeepStep(SinkKind.MEMORY, self._view.number, self.step))
        else:
            self._vote(is_believed=not doubted)

    def handle_kept_gradient(self, step: int, *, full: bool) -> None:
        """Let a gradient be committed, now that it is in the nodes' memory."""
        if self.activity is Activity.KEEP and step == self.step:
            self._replica.replicating.full = full
            self._vote(is_believed=True)

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

    def _report_contradictions(self) -> list[effects.Outcome]:
        """Report speculative tasks whose bits differ from those of the tasks that they copy."""
        if self.doubt != CONTRADICTED:
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
        standing, sums, replica = self._standing, self._sums, self._replica
        assert sums is not None, "a vote without sums"
        leads, ends = standing.leads_now, standing.ends_saved
        save, busy = replica.saves.opinion(self.step, standing.now, leads=leads, ends=ends)
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
            follow=replica.feeding.opinion(),
            protect=replica.replicating.opinion(self.step, standing.leads_now),
            staged=replica.replicating.staged,
        )
        standing.order(effects.Gather(self._view.number, Topic.VOTE, vote.row()))

    def _record_reduced(self, reduced: bool) -> None:
        """Record whether the complete gradient of the step is here and may be used."""
        if reduced != self._standing.status.reduced:
            self._standing.change(reduced=reduced)

    def _handle_votes(self, rows: Sequence[Row]) -> Verdict | None:
        standing, replica = self._standing, self._replica
        tally = self._counting.count(rows)
        if tally.alien:
            return Failed(f"votes of view {self._view.number}, step {self.step} do not match")
        if max(tally.doubts) > RIGHTLY:
            suspects = [self._view.workers[d - SOMEBODYS] for d in tally.doubts if d >= SOMEBODYS]
            self._rulings.record_doubt(self.step, suspects, self._sums.bits if self._sums else 0)
            self._redo(self._audits.audit_all(self._view, self.step, self.owners))
            return None
        standing.carry(self._rulings.settle(self.step, rightly=RIGHTLY in tally.doubts))
        whole_step = self.step + 1 if tally.save or tally.protect else self._audits.whole_step
        self._audits.agree(Alike(tally.alike), whole_step)
        if tally.save:
            replica.saves.agree(self.step + 1, self._view, tally.save)
        replica.replicating.record_votes(self.step, tally, standing.now)
        standing.carry(replica.feeding.handle_commit(self.step))
        replica.feeding.agree(tally.follow, self.step + 1)
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
        self.is_proved = self._newcomers.record_commit(self._me)
        if self.activity is Activity.VOTE:
            self._go_to(Activity.TASKS)

    # ------------------------------------------------------------ again, or not at all

    def _redo(self, audits: Sequence[Audit]) -> None:
        """Have the step computed once more, after the script has ended its present task."""
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
        """Have wrong members leave once all have heard it; (): nobody knows which ones are."""
        self._go_to(Activity.CONFESS)
        row = self._rulings.confess(self.step, wrong, diverged=diverged)
        self._standing.order(effects.Gather(self._view.number, Topic.CONFESS, row))

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
