"""What the members of a view hold against each other: fingerprints, audits, sums; what follows.

All hear the same, so all come to the same ruling. Who is wrong leaves the job; and where something
wrong may have been used already, everybody discards its state, to begin anew from a checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from holdfast.core.errors import Aborted
from holdfast.core.step import worker as machine
from holdfast.core.step.audit import Alike, Audit, Court, Ruling, Sentence, judge, plan, plan_sums
from holdfast.core.step.trust import Trust
from holdfast.core.types import Invalidation, View, WorkerId
from holdfast.train.checkpoint.saver import say
from holdfast.train.driver import Driver
from holdfast.train.step.auditing import StepAudits, check_sum
from holdfast.train.step.buckets import Bucket
from holdfast.train.step.reduction import (
    RIGHTLY,
    SOMEBODYS,
    TAG_AUDIT,
    Layout,
    Prints,
    all_gather,
)
from holdfast.train.transport.seam import Transport

NEVER = 1 << 60
MISTAKES_MAX = 1  # that are forgiven a worker
CALM_STEPS = 64  # after a sum that is rightly not finite, in which others are not doubted


class Judge:
    """One worker's. `keeps`: the job keeps checkpoints, from which it could begin anew."""

    def __init__(self, driver: Driver, audits: StepAudits, *, keeps: bool) -> None:
        self.seed = 0  # the job's
        self.trust = Trust(0)
        self.prints: Mapping[int, Prints] = {}  # by rank, of the step under way
        self.whole_print: Callable[[], int] = lambda: 0  # the fingerprint of all of the state
        self.note: Callable[[int, int, bool], None] = lambda step, view, again: None
        self.again: tuple[Audit, ...] = ()  # what is to be audited when the step is computed again
        self._driver = driver
        self._audits = audits
        self._keeps = keeps
        self._court = Court()
        self._mistakes = 0  # of this worker
        self._not_finite_at = -CALM_STEPS  # the last step that was rightly so
        self._doubted = -1  # the step that is computed again because its sum was not finite
        self._suspects: tuple[WorkerId, ...] = ()  # whose parts of it were not
        self._view: View
        self._layout: Layout
        self._transport: Transport

    def enter(self, view: View, layout: Layout, transport: Transport) -> None:
        """A view, whose members are connected."""
        self._view, self._layout, self._transport = view, layout, transport
        self._court = Court()
        self._doubted = -1

    def synced(self, compared: bool) -> None:
        """All members hold the state; `compared`: as their fingerprints say."""
        self.trust.enter(self._view, compared=compared)

    # ------------------------------------------------------------ a step

    def accepts(self, step: int, layout: Layout, buckets: Sequence[Bucket]) -> bool:
        """Whether the sums may be used; else the step is to be computed again.

        Aborted when somebody is wrong who leaves the job.
        """
        self._layout = layout
        self._compare_states()
        audits, owners = self._audits, self._driver.owners
        if audits.audits:
            digests = audits.compare(self._transport, layout, self._view)
            ruling = self._court.rule(digests, audits.audits, owners, self._view.workers)
            if not self._obey(step, ruling):
                return False
        self._check_sums(step, buckets)
        self._court = Court()
        self.trust.summed(step, owners, [audit.vrank for audit in audits.audits])
        return True

    def sure(self, step: int) -> bool:
        """Whether a sum of this step that is not finite is no reason to compute it again."""
        alone, given_up = len(self._view.members) == 1, self._audits.alike is Alike.NOTHING
        whole = len(self._audits.audits) == len(self._view.owners)
        return alone or given_up or whole or step < self._not_finite_at + CALM_STEPS

    def doubts(self, step: int, said: Sequence[int]) -> bool:
        """What all say of the sum. If it may wrongly be not finite, the step is computed again.

        Then each task by two workers. So it is if a copy of a task is not like the task.
        """
        workers = self._view.workers
        if max(said) > RIGHTLY:
            self._doubted = step
            self._suspects = tuple(sorted({workers[d - SOMEBODYS] for d in said if d >= SOMEBODYS}))
            self.again = plan(self.seed, step, self._driver.owners, workers, 1.0)
            return True
        if RIGHTLY in said:
            if self._doubted == step:
                self._tell(f"the gradient of step {step} is not finite, on all who compute it")
            self._not_finite_at = step
        elif self._doubted == step:
            for worker in self._suspects:
                text = f"worker {worker} had numbers in step {step} that were not finite; computed"
                self._tell(f"{text} again, they are", self._suspects)
                self._mistake(worker)
        return False

    # ------------------------------------------------------------ rulings

    def _compare_states(self) -> None:
        parts = {rank: part for rank, (part, _) in self.prints.items()}
        wholes = {rank: whole for rank, (_, whole) in self.prints.items() if whole}
        for found in (parts, wholes):
            if len(set(found.values())) > 1:
                self.differ({self._view.workers[rank]: found[rank] for rank in sorted(found)})

    def differ(self, prints: Mapping[WorkerId, int]) -> None:
        """The states of these members are not all the same. Aborted."""
        wrong, step = judge(prints).wrong, self._driver.committed
        for worker in wrong:
            text = f"the state of worker {worker} is not that of the others in step {step}"
            self._tell(text, wrong)
        if not wrong:
            self._tell(f"the workers hold different states in step {step}, and none has a majority")
        self._leave(wrong, diverged=True)

    def _obey(self, step: int, ruling: Ruling) -> bool:
        match ruling.sentence:
            case Sentence.USE:
                self._blame(step, ruling.wrong)
            case Sentence.UNLIKE:
                self._ask_less()
            case Sentence.AGAIN:
                self.again = ruling.audits
                return False
            case Sentence.LEAVE:
                self._blame(step, ruling.wrong, leaves=True)
                self._leave([worker for worker, _ in ruling.wrong], diverged=False)
            case Sentence.TIE:
                self._tell("the workers come to different gradients, and none has a majority")
                self._leave((), diverged=False)
        return True

    def _ask_less(self) -> None:
        """The hardware is not deterministic, or less so than was thought."""
        audits = self._audits
        tolerance = audits.classes.tolerance
        if audits.alike is Alike.BITS and tolerance:
            audits.alike = Alike.NEAR
            then = f"from now on audits compare within {tolerance:g} of a gradient's norm"
        else:
            audits.alike = Alike.NOTHING
            then = "nothing is audited any more"
        self._tell(
            f"the same task comes to other numbers each time: {then}; use deterministic "
            "algorithms (torch.use_deterministic_algorithms)"
        )

    def _check_sums(self, step: int, buckets: Sequence[Bucket]) -> None:
        """A share of the buckets is summed twice, by different members."""
        share = self._audits.share_of(step) if self._layout.size > 1 else 0.0
        for index in plan_sums(self.seed, step, len(buckets), share):
            wrong = check_sum(buckets[index], self._transport, self._layout)
            if wrong is None:
                self._tell("the workers come to different sums, and none has a majority")
                self._leave((), diverged=False)
            for rank in wrong or ():
                worker = self._view.workers[rank]
                self._tell(
                    f"worker {worker} has summed a part of step {step} wrongly, or received it "
                    "damaged; it was summed again",
                    [worker],
                )
                self._mistake(worker)

    def _blame(
        self, step: int, wrong: Collection[tuple[WorkerId, int]], *, leaves: bool = False
    ) -> None:
        """Who was wrong for the second time leaves."""
        for worker, vrank in wrong:
            self._tell(
                f"worker {worker} has computed virtual rank {vrank} of step {step} wrongly; the "
                "step was computed again",
                [worker for worker, _ in wrong],
            )
        if not leaves:
            for worker in {worker for worker, _ in wrong}:
                self._mistake(worker)

    def _mistake(self, worker: WorkerId) -> None:
        if worker == self._driver.worker:
            self._mistakes += 1
            if self._mistakes > MISTAKES_MAX:
                self._end()

    # ------------------------------------------------------------ what follows

    def _leave(self, wrong: Iterable[WorkerId], *, diverged: bool) -> None:
        """Who is wrong leaves; the others know what is invalidated, and may have to go back. Aborted.

        Nobody named: nobody knows who it is.
        """
        view, me, step = self._view, self._driver.worker, self._driver.committed
        leaving = set(wrong)
        found = self.trust.doubt(leaving or view.workers, step, diverged=diverged)
        sums, saved = NEVER if found.sums is None else found.sums, found.saved
        words = torch.tensor([sums, saved, self.whole_print()], dtype=torch.int64)
        liars: tuple[WorkerId, ...] = ()
        try:  # who is wrong must not leave before all others have heard of it
            heard = all_gather(self._transport, self._layout, words, TAG_AUDIT)
            sums, saved, _ = heard.amin(dim=0).tolist()
            states = judge(dict(zip(view.workers, heard[:, 2].tolist(), strict=True)))
            liars = tuple(sorted(leaving.difference(states.wrong)))
        except Aborted:
            pass  # then each says what it knows
        if me in leaving:
            self._end()
        tie = not leaving
        discarded = self._keeps and (tie or sums < NEVER)
        if discarded:
            self._tell(
                f"something wrong may have been used since step {saved}: the job goes back", leaving
            )
            self.note(saved, view.number, True)
        elif tie or sums < NEVER:
            since = min(sums, step)
            self._tell(
                f"from step {since} on the result may not be that of a sound run: there is no "
                "--store, and so no checkpoint to go back to",
                leaving,
            )
            self.note(since, view.number, False)
            if tie and me != view.leader:
                self._end()
        invalidation = Invalidation(after=saved, view=view.number, wrong=() if diverged else liars)
        self._driver.post(machine.Doubted(invalidation, discarded))
        raise Aborted("a worker is wrong")

    def _end(self) -> None:
        say("this worker computes wrongly, or holds a wrong state: it leaves the job")
        os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, text: str, wrong: Collection[WorkerId] = ()) -> None:
        """The job's story hears it from the leader, unless it is the leader who is wrong."""
        view = self._view
        tellers = [view.leader, *(w for w in view.workers if w != view.leader)]
        if self._driver.worker == next((w for w in tellers if w not in wrong), view.leader):
            self._driver.post(machine.EventNoted("wrong", text))
