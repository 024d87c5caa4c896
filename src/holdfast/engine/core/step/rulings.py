"""Finds wrong workers, and the consequences, from one member's record of all in its view. Pure.

All members hear the same, so all reach the same ruling. A wrong worker leaves the job; and where
something wrong may have been used already, all discard their state and begin from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.engine.core.ground.effects import Exit, GiveUp, NoteDoubt, Outcome
from holdfast.engine.core.ground.events import EventNoted, Row
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.step.audit import ATTEMPTS_MAX, Ruling, Sentence, judge
from holdfast.engine.core.step.newcomers import Refusal
from holdfast.engine.core.step.script_blame import ScriptBlame
from holdfast.engine.core.step.trust import Trust
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.types import WorkerId
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
CALM_STEPS = 64  # after a sum that is rightly not finite, in which others are not doubted


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
        self._confessed: Row = ()  # what this worker tells of it

    def enter(self, view: View) -> None:
        """Record that a view begins."""
        self._view = view
        self._doubted = -1
        self._is_steady = False

    def record_sync(self, *, compared: bool) -> None:
        """Record that all members hold the state; `compared`: their fingerprints say so."""
        if self._looks:
            self._trust.enter(self._view, compared=compared)

    def record_sums(self, step: int, owners: Sequence[WorkerId], audited: Iterable[int]) -> None:
        """Record that a step's sums are used from here on; these virtual ranks were audited."""
        if self._looks:
            self._trust.record_sums(step, owners, audited)

    # ------------------------------------------------------------ sums that are not finite

    def believes_not_finite(self, step: int, bits: int) -> bool:
        """Return whether sums that are not finite are believed without computing them again.

        They are if some were rightly so a short while ago. A lone worker cannot compare with
        others: it believes sums with the same `bits` twice, and sums that stay not finite in all
        its attempts.
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
                # If a lone worker left, no member could go on.
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
        """Record that these workers, which have joined, compute other results than the others."""
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

    def confess(self, step: int, wrong: Sequence[WorkerId], *, diverged: bool) -> Row:
        """Return the first step that may have used anything wrong; wrong workers leave then."""
        self._wrong, self._diverged = tuple(sorted(set(wrong))), diverged
        found = self._trust.doubt(self._wrong or self._view.workers, step, diverged=diverged)
        self._confessed = (NEVER if found.sums is None else found.sums, found.saved)
        return self._confessed

    def conclude(self, step: int, rows: Sequence[Row] | None) -> list[Outcome | Doubted]:
        """Draw the conclusion from the rows of all members; None: the group broke before.

        `rows`: the first wrong sums and copies of the state, and a fingerprint of the state.
        """
        view, wrong = self._view, self._wrong
        sums, saved, liars = int(self._confessed[0]), int(self._confessed[1]), wrong[:0]
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
