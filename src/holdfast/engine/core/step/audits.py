"""Plans which tasks of a step two workers compute, and keeps their results. Pure.

Which tasks are audited follows from the step alone; the workers that compute them follow from the
view. So a result of the view before still counts.

`plan_early` plans audits of the script. A script may keep a value that its first batch sets, an
address, or the time of its start. Then the results of a worker agree with each other, and only
another worker's computation of the same task shows the fault. So members compare tasks in the job's
first steps, in the first steps after workers have joined, and later one task in a cycle, in the
step in which its owner repeats that task: both compute at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from holdfast.engine.core.errors import require
from holdfast.engine.core.ground.effects import Compute
from holdfast.engine.core.ground.events import Purpose, Row, StepKind
from holdfast.engine.core.step.audit import (
    FICKLE,
    Alike,
    Audit,
    Classes,
    Court,
    Ruling,
    Sentence,
    audit_by_all,
    owed_audits,
    plan,
    plan_sums,
)
from holdfast.engine.core.step.newcomers import Newcomers
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.core.views import View

SKETCH_WORDS = 9  # the norm's square, and eight sums with random signs
EARLY_STEPS = 4  # first steps of a job, or after a join, in which a script is watched closely
PAIRS_MAX = 4  # pairs of workers compare a task in one of these


class Audits:
    """Keeps one worker's audits of the step under way, as the present view plans them.

    `share`: of all tasks that are audited, because machines may be wrong. `cycle`: steps in which
    one more is, because the script may be (`plan_early`); 0: none is.
    """

    def __init__(
        self,
        seed: int,
        share: float,
        tolerance: float,
        newcomers: Newcomers | None = None,
        cycle: int = 0,
    ) -> None:
        self.alike = Alike.BITS  # what two runs of a task must be
        self.whole_step = -1  # the whole state is compared in it: the first after a checkpoint
        self.planned: tuple[Audit, ...] = ()
        self._audited: frozenset[int] = frozenset()  # the virtual ranks of these
        self._seed = seed
        self._share = share  # audits compare this share of tasks and sums
        self._cycle = cycle
        self._exact = False  # on a sound machine a task has the same bits each time
        self._mixed = False  # the members' processors may compute other bits
        self._disputed: frozenset[int] = frozenset()  # virtual ranks, in the step under way
        self._newcomers = newcomers or Newcomers(looks=False)
        self._classes = Classes(tolerance)
        self._court = Court()
        self._planned_in: tuple[ViewNumber, int] | None = None  # the view and the step

    def agree(self, alike: Alike, whole_step: int) -> None:
        """Take over the agreement of all members."""
        self.alike, self.whole_step = alike, whole_step

    def hear(self, view: View, rows: Sequence[Row], *, drops: bool) -> None:
        """Take in the members' words as a view begins, by rank; `drops`: late results are not used.

        A row has the worker's `alike` and `whole_step`, the kind of its processor, and 1 if a task
        has the same bits there each time.
        """
        alike = Alike(int(max(row[0] for row in rows)))
        # Dropped results cannot be compared.
        self.agree(Alike.NOTHING if drops else alike, int(max(row[1] for row in rows)))
        kinds = [int(row[2]) for row in rows]
        self._exact, self._mixed = all(row[3] for row in rows), len(set(kinds)) > 1
        self._newcomers.compare_processors(view, kinds)

    def postpone(self, step: int) -> None:
        """Record that the script did not rest after `step` steps: a later one has its turn."""
        if self.whole_step == step:
            self.whole_step = step + 1

    def ask_less(self) -> str:
        """Compare within the tolerance, or no tasks, as every worker contradicts itself; log it."""
        then = "nothing is audited any more"
        near = self.alike is Alike.BITS and self._classes.tolerance
        self.alike = Alike.NEAR if near else Alike.NOTHING
        if near:
            then = f"from now on audits compare within {self.tolerance:g} of a gradient's norm"
        return (
            f"the same task gives other numbers each time: {then}; use deterministic algorithms "
            "(torch.use_deterministic_algorithms)"
        )

    @property
    def is_comparable(self) -> bool:
        """Return whether the same task has the same bits on all members that are sound."""
        return self._exact and not self._mixed

    @property
    def tolerance(self) -> float:
        """Return the share of its norm by which a gradient may differ where bits vary."""
        return self._classes.tolerance

    def share_of(self, step: int) -> float:
        """Return the extent to which the step is compared."""
        if self.alike is Alike.NOTHING:
            return 0.0
        return 1.0 if self._share and self.whole_step == step else self._share

    def enter(self) -> None:
        """Enter a view, whose members have yet to agree on what audits ask."""
        self._planned_in = None
        self._classes.forget()

    def plan(
        self, view: View, step: int, owners: Sequence[WorkerId], kind: StepKind = StepKind.GRADIENTS
    ) -> None:
        """Plan the audits of a step, unless that was done in this view."""
        if self._planned_in == (view.number, step):
            return None
        self._classes.forget()
        self._planned_in = (view.number, step)
        self._disputed = frozenset()
        self._court = Court(self._newcomers.watched_workers(view), view)
        if kind is not StepKind.GRADIENTS or self.alike is Alike.NOTHING:
            return self.plan_again(())
        planned = plan(self._seed, step, owners, view.workers, self.share_of(step))
        if self.is_comparable and not self._newcomers.watched_workers(
            view
        ):  # joiners are compared already
            of_machines = {audit.vrank for audit in planned}
            early = plan_early(view, step, owners, self._cycle)
            planned += tuple(audit for audit in early if audit.vrank not in of_machines)
        planned = tuple(sorted(planned, key=lambda audit: audit.vrank))
        return self.plan_again(self._newcomers.audits(view, owners, planned))

    def plan_again(self, audits: Sequence[Audit]) -> None:
        """Record that the step is computed once more, with these audits."""
        self.planned = tuple(audits)
        self._audited = frozenset(audit.vrank for audit in self.planned)

    def audit_all(self, view: View, step: int, owners: Sequence[WorkerId]) -> tuple[Audit, ...]:
        """Return audits of every task of the step."""
        return plan(self._seed, step, owners, view.workers, 1.0)

    def plan_sum_checks(self, step: int, buckets: int) -> list[int]:
        """Return which of the step's buckets are summed twice."""
        return list(plan_sums(self._seed, step, buckets, self.share_of(step)))

    def order(self, step: int, vrank: int, purpose: Purpose) -> Compute:
        """Return the order to compute a task, and to report the result in the right form."""
        return Compute(
            step,
            vrank,
            purpose,
            digest=self.wants_digest(vrank),
            near=self.alike is Alike.NEAR,
            disputed=vrank in self._disputed,
            compared=self._planned_in is not None and bool(self.planned),
        )

    def wants_digest(self, vrank: int) -> bool:
        """Return whether a task's digest may be asked for: without a plan yet, any one's may be."""
        if self._planned_in is None:
            return bool(self._share or (self._cycle and self._exact))
        return vrank in self._audited

    def owed_vranks(self, me: WorkerId, step: OpenStep) -> list[int]:
        """Return the virtual ranks that this worker has yet to compute for audits.

        Its own as well, if no digest was taken of them.
        """
        if self._planned_in is None:
            return []
        others = owed_audits(self.planned, me, step.audited)
        mine = [a.vrank for a in self.planned if me == a.owner and a.vrank not in step.digests]
        return others + mine

    def row(self, step: OpenStep) -> Row:
        """Return this worker's row on the audited tasks: digests, or sketches.

        The last number is the virtual rank of another task that had several results here, or -1.
        """
        found: list[float] = []
        for audit in self.planned:
            digest = step.digests.get(audit.vrank, 0)
            if self.alike is Alike.NEAR:
                found += digest if isinstance(digest, tuple) else (0.0,) * SKETCH_WORDS
            else:
                found.append(digest if isinstance(digest, int) else 0)
        fickle = (v for v, digest in step.digests.items() if digest == FICKLE)
        return (*found, min((v for v in fickle if v not in self._audited), default=-1))

    def rule(self, rows: Sequence[Row], view: View, owners: Sequence[WorkerId]) -> Ruling:
        """Judge the results of all members; `rows` by rank."""
        words = len(self.planned) * (SKETCH_WORDS if self.alike is Alike.NEAR else 1) + 1
        told = [len(row) for row in rows]
        require(told == [words] * len(view.workers), f"{words} words are audited, told are {told}")
        rank = {worker: i for i, worker in enumerate(view.workers)}
        digests = {
            audit.vrank: {w: self._number(audit.vrank, rows[rank[w]], i) for w in audit.workers}
            for i, audit in enumerate(self.planned)
        }
        ruling = self._court.rule(digests, self.planned, owners, view.workers)
        fickle = sorted({int(row[-1]) for row in rows} - {-1})
        if fickle and ruling.sentence in (Sentence.USE, Sentence.AGAIN):
            known = ruling.audits if ruling.sentence is Sentence.AGAIN else self.planned
            more = [audit_by_all(Audit(vrank, owners[vrank], ()), view.workers) for vrank in fickle]
            ruling = _have_all_compute(known, more, ruling.disputed)
        self._disputed = frozenset(ruling.disputed)
        sentence = ruling.sentence
        if sentence in (Sentence.UNLIKE, Sentence.SCRIPT):
            sentence = Sentence.SCRIPT if self._exact else Sentence.UNLIKE
        return dataclasses.replace(ruling, sentence=sentence)

    def record_sums(self) -> None:
        """Record that the step's sums are used; the next one is judged on its own."""
        self._court = Court()
        self._disputed = frozenset()

    def _number(self, vrank: int, row: Row, index: int) -> int:
        """Return a number for a gradient: the same for gradients that are alike."""
        if self.alike is not Alike.NEAR:
            return int(row[index])
        squares, *sums = row[index * SKETCH_WORDS : (index + 1) * SKETCH_WORDS]
        return self._classes.number(vrank, [squares**0.5, *sums])


def _have_all_compute(
    known: Sequence[Audit], more: Sequence[Audit], disputed: Sequence[int]
) -> Ruling:
    """Return a ruling with more audits, of tasks that had several results on their owners."""
    audits = sorted((*known, *more), key=lambda audit: audit.vrank)
    again = sorted({*disputed, *(audit.vrank for audit in more)})
    return Ruling(sentence=Sentence.AGAIN, audits=tuple(audits), disputed=tuple(again))


def plan_early(view: View, step: int, owners: Sequence[WorkerId], cycle: int) -> tuple[Audit, ...]:
    """Return the step's audits of the script, by virtual rank; `cycle`: steps, 0: there are none.

    An early step has some pairs of workers, so that in few steps each is compared with another.
    """
    workers = view.workers
    if not cycle or len(workers) < 2:
        return ()
    if not _is_early(view, step):
        turn, within = divmod(step, cycle)
        vrank = turn % len(owners)
        return (
            ()
            if within
            else (Audit(vrank, owners[vrank], (_other_worker(workers, owners[vrank], turn),)),)
        )
    hosts = [worker for worker in workers if worker in owners]
    first = step * PAIRS_MAX % len(hosts)
    chosen = [*hosts[first:], *hosts[:first]][:PAIRS_MAX]
    found = []
    for owner in chosen:
        hosted = [vrank for vrank, each in enumerate(owners) if each == owner]
        vrank = hosted[step % len(hosted)]
        found.append(Audit(vrank, owner, (_other_worker(workers, owner, step),)))
    return tuple(sorted(found, key=lambda audit: audit.vrank))


def _is_early(view: View, step: int) -> bool:
    joined = bool(view.joiners) and step < view.resume_step + EARLY_STEPS
    return joined or step < EARLY_STEPS


def _other_worker(workers: Sequence[WorkerId], owner: WorkerId, turn: int) -> WorkerId:
    """Return another worker than the owner, a different one each turn."""
    others = [worker for worker in workers if worker != owner]
    return others[(workers.index(owner) + turn) % len(others)]
