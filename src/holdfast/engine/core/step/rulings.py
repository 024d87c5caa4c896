"""Finds wrong workers, and the consequences, from one member's record of all in its view. Pure.

All members receive the same rows, so all reach the same ruling. A wrong worker leaves the job; and
where something wrong may have been used already, all discard their state and begin from a
checkpoint.

- `Trust` finds the step since which a member may be wrong. Audits see gradients, fingerprints see
  the state, and each sees only a share of it in a step. So a member that turns out to be wrong may
  have been wrong for a while, and the other members have used its work.
- `ScriptBlame` blames the script once too many machines would have to be at fault. It remembers the
  machines that were wrong in a steady way, and the steps in which two halves of the workers had two
  opinions. The limits are in docs/silent-errors.md: fewer faulty machines never end a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.ground.effects import Exit, GiveUp, NoteDoubt, Outcome
from holdfast.engine.core.ground.events import EventNoted, Row
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.step.audit import (
    ATTEMPTS_MAX,
    Ruling,
    Sentence,
    are_too_many,
    judge,
    name_machines,
)
from holdfast.engine.core.step.audits import EARLY_STEPS
from holdfast.engine.core.step.newcomers import Refusal
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import View

NEVER = 1 << 60
UPDATES = (
    "the script updates them by something that is not the same on all workers; use only .grad, "
    "step.loss and job.values, which are, and not the last batch or its loss, nor job.is_leader"
)
KEEPS = (
    "the script keeps something that is not the same on all workers (a value that the first batch "
    "sets, a counter, the time of a start, an address): let a task depend on nothing but the "
    "parameters, its batch and the global random generators"
)
MISTAKES_MAX = 1  # a worker is forgiven for this many
#: After a sum that is rightly not finite, further ones are believed for this many steps.
CALM_STEPS = 64
STEADY_MAX = 2  # machines that may be wrong in a steady way
TIES_MAX = 2  # times that two halves of the workers may hold different states;
TIES_MAX_LOST = 1  # without a checkpoint to go back to
WINDOW_STEPS = 256  # machines and ties count for this number of steps,
WINDOW_CYCLES = 4  # or of cycles, whichever is longer


class Rulings:
    """Keeps one worker's record of wrong results. `cycle`: steps to compare a whole state in.

    `keeps`: the job has checkpoints to begin from again. `looks`: something is compared.
    """

    def __init__(self, me: WorkerId, cycle: int, *, keeps: bool, looks: bool) -> None:
        self._me = me
        self._keeps = keeps
        self._looks = looks
        self._trust = Trust(cycle)
        self._view: View
        self._mistakes = 0  # this worker's own
        self._not_finite_at = -CALM_STEPS  # the last step that was rightly so
        self._doubted = -1  # the step that is computed again because its sum was not finite
        self._bits: list[int] = []  # digests of its sums, attempt by attempt
        self._suspects: tuple[WorkerId, ...] = ()  # workers with parts of it that were not finite
        self._wrong: tuple[WorkerId, ...] = ()  # workers that leave
        self._diverged = False  # it is their states that are wrong
        self._is_steady = False  # the wrong workers agree with themselves
        self.script = ScriptBlame(cycle, keeps=keeps)
        self._fault_row: Row = ()  # this worker's row about it

    def enter(self, view: View) -> None:
        """Record that a view begins."""
        self._view = view
        self._doubted = -1
        self._is_steady = False

    def record_sync(self, *, compared: bool) -> None:
        """Record that all members hold the state; `compared`: they have compared fingerprints."""
        if self._looks:
            self._trust.enter(self._view, compared=compared)

    def record_sums(self, step: int, owners: Sequence[WorkerId], audited: Iterable[int]) -> None:
        """Record that a step's sums are used from here on; these virtual ranks were audited."""
        if self._looks:
            self._trust.record_sums(step, owners, audited)

    # ------------------------------------------------------------ sums that are not finite

    def believes_not_finite(self, step: int, bits: int) -> bool:
        """Return whether sums that are not finite are believed without computing them again.

        They are if some were rightly not finite a short while ago. A lone worker cannot compare: it
        believes sums with the same `bits` twice, and sums that stay not finite in all its attempts.
        """
        alone = len(self._view.members) == 1 and self._doubted == step
        repeated = self._bits[-1:] == [bits] or len(self._bits) + 1 >= ATTEMPTS_MAX
        return (alone and repeated) or step < self._not_finite_at + CALM_STEPS

    def record_doubt(self, step: int, suspects: Iterable[WorkerId], bits: int = 0) -> None:
        """Record that the step is computed again: its sum is not finite, or a copy differs.

        `bits`: a digest of that sum.
        """
        self._bits = [*self._bits, bits] if self._doubted == step else [bits]
        self._doubted, self._suspects = step, tuple(sorted(set(suspects)))

    def settle(self, step: int, *, rightly: bool) -> list[Outcome]:
        """Record that no member doubts the sums any more; `rightly`: though they are not finite."""
        out: list[Outcome] = []
        if rightly:
            if self._doubted == step:
                several = len(self._view.members) > 1
                who = "on all workers that compute it" if several else "each time it is computed"
                text = f"the gradient of step {step} is not finite, {who}"
                out += self.tell(text, kind="not_finite")
            self._not_finite_at = step
        elif self._doubted == step:
            for worker in self._suspects:
                text = f"worker {worker} had numbers in step {step} that were not finite; computed"
                out += self.tell(f"{text} again, they are", self._suspects, worker)
                # If a lone worker left, no member would be left.
                out += self._count_mistake(worker) if len(self._view.members) > 1 else []
        return out

    # ------------------------------------------------------------ blame

    def blame(self, step: int, ruling: Ruling) -> list[Outcome]:
        """Record the workers that have computed virtual ranks wrongly."""
        out: list[Outcome] = []
        wrong, leaves = ruling.wrong, ruling.sentence is Sentence.LEAVE
        ends = leaves or ruling.sentence is Sentence.TIE
        self._is_steady = self.script.comparable and ruling.steady and ends
        for worker, vrank in wrong:
            out += self.tell(
                f"worker {worker} has computed virtual rank {vrank} of step {step} wrongly; the "
                "step was computed again",
                [worker for worker, _ in wrong],
                worker,
            )
        if not leaves:
            for worker in sorted({worker for worker, _ in wrong}):
                out += self._count_mistake(worker)
        return out

    def refuse(self, step: int, workers: Sequence[WorkerId], refusal: Refusal) -> list[Outcome]:
        """Record that these workers, which have joined, compute different results."""
        named = ", ".join(f"worker {worker}" for worker in workers)
        text = (
            f"{named} joined before step {step}, and computes its tasks otherwise than others, "
            "each time"
        )
        script = (
            "the script keeps something that the job's state lacks: a variable of its own that "
            "steps change, or a module that is not protected; keep it in job.values or in "
            "job.protect(...)"
        )
        if refusal is Refusal.SCRIPT:
            return [GiveUp(f"{text}, as another machine does: {script}", by_script=True)]
        if refusal is Refusal.KIND:
            kind = "its processor, its GPU or its version of torch is of another kind"
            return self.tell(f"{text}: it leaves, because {kind}", workers, workers[0])
        why = f"its machine computes wrongly, or {script}"
        return self.tell(f"{text}: it leaves; {why}", workers, workers[0])

    def accuse_script(self, step: int) -> list[Outcome]:
        """Give up on the script, since several machines contradict themselves at once."""
        text = f"several workers come to other results of the same task in step {step}"
        return [GiveUp(f"{text}: {KEEPS}", by_script=True)]

    def record_wrong_sum(self, step: int, wrong: Sequence[WorkerId]) -> list[Outcome]:
        """Record that these workers have summed a bucket wrongly; the sum was put right."""
        out: list[Outcome] = []
        if not wrong:
            text = f"a sum of step {step} was wrong, and was made again; its maker is not known"
            return self.tell(text)
        for worker in wrong:
            out += self.tell(
                f"worker {worker} has summed a part of step {step} wrongly, or received it "
                "damaged; it was summed again",
                [worker],
                worker,
            )
            out += self._count_mistake(worker)
        return out

    def _count_mistake(self, worker: WorkerId) -> list[Outcome]:
        if worker != self._me:
            return []
        self._mistakes += 1
        return [Exit()] if self._mistakes > MISTAKES_MAX else []

    # ------------------------------------------------------------ leaving

    def judge_states(
        self, step: int, prints: Mapping[WorkerId, int]
    ) -> tuple[tuple[WorkerId, ...], list[Outcome]]:
        """Judge states that are not all the same; returns the wrong workers, and events."""
        wrong = judge(prints).wrong
        out: list[Outcome] = []
        for worker in wrong:
            text = f"the state of worker {worker} is not that of the others in step {step}"
            out += self.tell(text, wrong, worker)
        if not wrong:
            text = f"the workers hold different states in step {step}, and none has a majority"
            out += self.tell(text)
        return wrong, out

    def report_fault(self, step: int, wrong: Sequence[WorkerId], *, diverged: bool) -> Row:
        """Return the first step that may have used anything wrong; wrong workers leave then."""
        self._wrong, self._diverged = tuple(sorted(set(wrong))), diverged
        found = self._trust.doubt(self._wrong or self._view.workers, step, diverged=diverged)
        self._fault_row = (NEVER if found.sums is None else found.sums, found.saved)
        return self._fault_row

    def conclude(self, step: int, rows: Sequence[Row] | None) -> list[Outcome | Doubted]:
        """Draw the conclusion from the rows of all members; None: the group broke before.

        `rows`: the first wrong sums and copies of the state, and a fingerprint of the state.
        """
        view, wrong = self._view, self._wrong
        sums, saved, liars = int(self._fault_row[0]), int(self._fault_row[1]), wrong[:0]
        if rows is not None:
            sums, saved = (int(min(row[i] for row in rows)) for i in (0, 1))
            prints = {w: int(row[2]) for w, row in zip(view.workers, rows, strict=True)}
            astray = judge(prints).wrong
            liars = tuple(w for w in wrong if w not in astray)
            if self._is_steady and self.script.covers(view, step, liars, prints):
                text = f"workers come to different gradients in step {step} from the same state"
                machines = "or one of these machines is at fault, each time in the same way"
                return [GiveUp(f"{text}, each time: {KEEPS}; {machines}", by_script=True)]
        if self._me in wrong:
            return [Exit()]
        out: list[Outcome | Doubted] = []
        tie = not wrong
        if tie and self.script.ties_too_often(step):
            text = f"workers hold different states again and again, the last time in step {step}"
            return [GiveUp(f"{text}: {UPDATES}", by_script=True)]
        discarded = self._keeps and (tie or sums < NEVER)
        if discarded:
            text = f"something wrong may have been used since step {saved}: the job goes back"
            out += [*self.tell(text, wrong), NoteDoubt(saved, view.number, True)]
        elif tie or sums < NEVER:
            since = min(sums, step)
            text = (
                f"from step {since} on the result may not be that of a sound run: there is no "
                "--store, and so no checkpoint to go back to"
            )
            out += [*self.tell(text, wrong), NoteDoubt(since, view.number, False)]
            if tie and self._me != view.leader:
                return [*out, Exit()]
        found = () if self._diverged else liars
        invalidation = Invalidation(after=saved, view=view.number, wrong=found)
        return [*out, Doubted(invalidation, discarded)]

    # ------------------------------------------------------------ leaves

    def tell(
        self,
        text: str,
        wrong: Collection[WorkerId] = (),
        about: WorkerId | None = None,
        kind: str = "wrong",
    ) -> list[Outcome]:
        """Return an event for the log, at one member: the leader, unless that is wrong itself.

        `about`: the one worker that it is about.
        """
        view = self._view
        tellers = [view.leader, *(w for w in view.workers if w != view.leader)]
        teller = next((w for w in tellers if w not in wrong), view.leader)
        return [EventNoted(kind, text, about)] if self._me == teller else []


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongSince:
    """Names the first steps that may be wrong.

    `sums`: the first step whose sum may be wrong; None if all were audited. `saved`: the first step
    after which a copy of the state may be wrong.
    """

    sums: int | None
    saved: int


@dataclass(slots=True)
class _Seen:
    """Keeps the audits and comparisons of one member."""

    incarnation: Incarnation
    #: The step at which it joined, with a state that all have compared.
    joined: int
    #: No audit before this step has found it wrong.
    agreed: int
    #: From this step on all its tasks were audited.
    covered: int
    #: The step in which it was suspended.
    left: int | None = None


class Trust:
    """Keeps the audits of a view's members. `cycle`: steps in which every byte is compared."""

    def __init__(self, cycle: int) -> None:
        self._cycle = cycle
        self._seen: dict[WorkerId, _Seen] = {}

    def enter(self, view: View, *, compared: bool) -> None:
        """Enter a view; `compared`: the whole states of its members were, and are the same."""
        before, step = self._seen, view.resume_step
        self._seen = {}
        for member in view.members:
            seen = before.get(member.worker)
            if seen is None or seen.incarnation != member.incarnation:
                seen = _Seen(member.incarnation, step, step, step)
            elif compared:
                seen.joined, seen.left = step, None
            self._seen[member.worker] = seen
        for lag in (*view.suspended, *view.catching_up):
            if (seen := before.get(lag.worker)) and seen.incarnation == lag.incarnation:
                self._seen[lag.worker] = dataclasses.replace(seen, left=lag.committed)

    def record_sums(self, step: int, owners: Sequence[WorkerId], audited: Iterable[int]) -> None:
        """Record that the step's sums are used from here on; `audited`: virtual ranks."""
        looked = set(audited)
        for vrank, worker in enumerate(owners):
            if vrank in looked:  # it may have become wrong just after
                self._seen[worker].agreed = step
            else:
                self._seen[worker].covered = step + 1
        for worker in dict.fromkeys(owners):  # only owners had tasks to look at
            seen = self._seen[worker]
            if seen.covered <= step:
                seen.agreed = step + 1

    def doubt(self, workers: Iterable[WorkerId], step: int, *, diverged: bool) -> WrongSince:
        """Find the steps since which workers may be wrong, as they are in the uncommitted `step`.

        This member knows no step for a member that has just joined; older members do. `diverged`:
        their states are wrong; else their gradients, for whatever reason.
        """
        sums, saved = [], [step]
        for seen in (self._seen[worker] for worker in workers if worker in self._seen):
            last = step if seen.left is None else min(step, seen.left)
            compared = max(last - self._cycle, seen.joined) if self._cycle else last
            since = compared if diverged else min(seen.agreed, compared)
            saved.append(since)
            sums += [since] if seen.covered > since else []
        return WrongSince(sums=min(sums, default=None), saved=min(saved))


class ScriptBlame:
    """Counts wrong machines and ties. `cycle`: steps; `keeps`: the job has checkpoints.

    `comparable`: the same task has the same bits on all sound members.
    """

    def __init__(self, cycle: int, *, keeps: bool) -> None:
        self.comparable = False
        self._keeps = keeps
        self._window = max(WINDOW_STEPS, WINDOW_CYCLES * cycle)  # steps
        self._ties: list[int] = []  # steps in which states or gradients tied
        self._tied_at = -self._window  # the last step of a tie between gradients, with equal states
        self._steady: dict[str, int] = {}  # the last step in which each machine was wrong

    def covers(
        self, view: View, step: int, liars: Sequence[WorkerId], prints: Mapping[WorkerId, int]
    ) -> bool:
        """Return whether steady results that differ are the script's fault.

        `liars`: the minority with the right state; without one, it is a tie. A tie late in a job
        that has a checkpoint may be the fault of a machine that has just failed: the job goes back,
        and ends only if it ties again.
        """
        self._steady |= dict.fromkeys(sorted(name_machines(view, liars)), step)
        lately = [name for name, at in self._steady.items() if at > step - self._window]
        if are_too_many(len(lately), view, STEADY_MAX):
            return True
        if liars or len(set(prints.values())) > 1:
            return False
        again, self._tied_at = step < self._tied_at + self._window, step
        return again or not self._keeps or step < EARLY_STEPS

    def ties_too_often(self, step: int) -> bool:
        """Record a tie; return whether memory hardly fails as often as there were ties lately."""
        self._ties = [*(at for at in self._ties if at > step - self._window), step]
        most = TIES_MAX if self._keeps else TIES_MAX_LOST
        return self.comparable and len(self._ties) > most
