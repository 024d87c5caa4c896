"""Decides which tasks are computed twice, and which worker was wrong if the bits differ. Pure.

A task is a pure function, so two workers must compute the same bits. Every member of a view makes
the same plan for a step; tasks that differ are computed again by all members, and the majority
rules. Where every worker contradicts itself the hardware is not deterministic: then a few sums of
each gradient are compared instead, within a tolerance.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

ATTEMPTS_MAX = 3  # at a step
SHARE = 0.25  # more of a job's workers are never on wrong machines at about the same time
RUNS_DISPUTED = 12  # runs of a task on each worker if workers disagree about its result
FICKLE = -1  # stands for the digest of a task that had several on one worker
SUBSTITUTED = -2  # stands for a digest if a task has left out records that cannot be read

Digests = Mapping[int, Mapping[WorkerId, int]]  # tasks' digests, by virtual rank and worker
Sketch = Sequence[float]  # a gradient's norm, and sums over its parts with random signs


class Alike(enum.IntEnum):
    """Sets how alike two runs of the same task must be. A job's value only ever goes up."""

    #: The same bits.
    BITS = 0
    #: Numbers within a tolerance.
    NEAR = 1
    #: They differ by more, again and again: audits end.
    NOTHING = 2


@dataclass(frozen=True, slots=True)
class Audit:
    """`auditors` compute the task of `vrank` as well as its owner does."""

    vrank: int
    owner: WorkerId
    auditors: tuple[WorkerId, ...]

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self.owner, *self.auditors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Gives `right`, the majority's digest or None, and `wrong`, the workers that differ."""

    right: int | None
    wrong: tuple[WorkerId, ...] = ()


def plan(
    seed: int, step: int, owners: Sequence[WorkerId], workers: Sequence[WorkerId], share: float
) -> tuple[Audit, ...]:
    """Choose which of the step's tasks to audit: a `share` of them, on average over many steps.

    If `share` is 1, every worker takes part, also one that hosts no virtual rank.
    """
    if share <= 0 or len(workers) < 2:
        return ()
    limit = int(share * (1 << 32))
    hosts = frozenset(owners)
    idle = [worker for worker in workers if worker not in hosts] if share >= 1 else []
    found = []
    for vrank, owner in enumerate(owners):
        dice = _mix(_mix(_mix(seed) ^ step) ^ vrank)
        if dice & 0xFFFFFFFF < limit:
            others = [worker for worker in workers if worker != owner]
            auditor = idle.pop() if idle else others[(dice >> 32) % len(others)]
            found.append(Audit(vrank, owner, (auditor,)))
    return tuple(found)


def owed_audits(audits: Sequence[Audit], worker: WorkerId, done: Container[int]) -> list[int]:
    """Virtual ranks of other workers that the worker has yet to compute."""
    return [a.vrank for a in audits if worker in a.auditors and a.vrank not in done]


def plan_sums(seed: int, step: int, buckets: int, share: float) -> tuple[int, ...]:
    """Choose the buckets of the step that are summed twice, by different workers each time."""
    limit = int(share * (1 << 32))
    dice = (_mix(_mix(_mix(seed ^ 1) ^ step) ^ bucket) for bucket in range(buckets))
    return tuple(b for b, each in enumerate(dice) if each & 0xFFFFFFFF < limit)


def audit_by_all(audit: Audit, workers: Sequence[WorkerId]) -> Audit:
    """Return an audit of the same task by all workers."""
    return Audit(audit.vrank, audit.owner, tuple(w for w in workers if w != audit.owner))


def judge(digests: Mapping[WorkerId, int]) -> Judgement:
    """Find the majority among the digests of one task, as each of these workers has computed it."""
    (most, count), *_ = Counter(digests.values()).most_common(1)
    if 2 * count <= len(digests) or most == FICKLE:
        return Judgement(right=None)
    wrong = tuple(worker for worker, digest in sorted(digests.items()) if digest != most)
    return Judgement(right=most, wrong=wrong)


def are_too_many(machines: int, view: View, borne: int) -> bool:
    """Return whether more machines are wrong than `borne`, and than ever are in such a job."""
    return machines > max(borne, SHARE * len(view.members))


def name_machines(view: View, wrong: Collection[WorkerId]) -> frozenset[str]:
    """Return names of the machines that are at fault if these members of a view are.

    A node all of whose workers are wrong is one machine. Where other workers on it are right, or
    the view has no other node, each wrong worker is one: its own GPU or memory may be at fault.
    """
    right = {member.agent for member in view.members if member.worker not in wrong}
    one_node = len({member.agent for member in view.members}) == 1
    return frozenset(
        f"worker {member.worker}" if one_node or member.agent in right else f"node {member.agent}"
        for member in view.members
        if member.worker in wrong
    )


def are_near(a: Sketch, b: Sketch, tolerance: float) -> bool:
    """Return whether two gradients differ by at most `tolerance` of their norm, by their sketches.

    The distance of two sketches is about the distance of the gradients (a count sketch: Charikar,
    Chen and Farach-Colton 2002); one element that is off by more shows always.
    """
    if not (math.isfinite(a[0]) and math.isfinite(b[0])):
        return math.isfinite(a[0]) == math.isfinite(b[0])
    gap = max(math.dist(a[1:], b[1:]), abs(a[0] - b[0]))
    return gap <= tolerance * max(a[0], b[0])


class Classes:
    """Numbers for gradients of one step: near ones have the same, so that they can be judged."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._known: dict[int, list[Sketch]] = {}  # by virtual rank, the first of each class

    def forget(self) -> None:
        self._known.clear()

    def number(self, vrank: int, sketch: Sketch) -> int:
        known = self._known.setdefault(vrank, [])
        for number, first in enumerate(known):
            if are_near(first, sketch, self.tolerance):
                return number
        known.append(sketch)
        return len(known) - 1


class Sentence(enum.Enum):
    """Names the fates of a step after its audits."""

    #: The sums are right.
    USE = "use"
    #: The step is computed again.
    AGAIN = "again"
    #: The same, after workers that were wrong before have left.
    LEAVE = "leave"
    #: No audit is possible: every worker contradicts itself.
    UNLIKE = "unlike"
    #: No digest has a majority, again and again.
    TIE = "tie"
    #: Several machines contradict themselves, and no majority agrees.
    SCRIPT = "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """Rules on an attempt at a step.

    `wrong`: workers, and the virtual ranks that they have computed wrongly. `audits`: the audits of
    the next attempt. `disputed`: virtual ranks without a majority, or computed again because
    workers differ. `steady`: no worker has contradicted itself.
    """

    sentence: Sentence
    wrong: tuple[tuple[WorkerId, int], ...] = ()
    disputed: tuple[int, ...] = ()
    steady: bool = False
    audits: tuple[Audit, ...] = ()


class Court:
    """Rules on the audits of one step: all members have the same rows and make the same ruling.

    The majority of all decides. The results of `unproven` workers count only where the rest have no
    majority, because all of the unproven may lack the same state. `view` shows which workers share
    a node; without it none do.
    """

    def __init__(self, unproven: Collection[WorkerId] = (), view: View | None = None) -> None:
        self._unproven = frozenset(unproven)
        self._view = view
        self._heard: list[Digests] = []  # attempt by attempt

    def rule(
        self,
        digests: Digests,
        audits: Sequence[Audit],
        owners: Sequence[WorkerId],
        workers: Sequence[WorkerId],
    ) -> Ruling:
        """Rule on the next attempt at the step; `digests` are those of its audited tasks.

        A task that had to leave out a record on one worker may rightly differ on another.
        """
        digests = {v: each for v, each in digests.items() if SUBSTITUTED not in each.values()}
        self._heard.append(digests)
        attempts = len(self._heard)
        differing = [v for v, each in digests.items() if len(set(each.values())) > 1]
        if not differing and attempts == 1:
            return Ruling(sentence=Sentence.USE)
        judged = {vrank: self._judge(each) for vrank, each in digests.items()}
        if any(self._are_fickle(digests[v]) for v, each in judged.items() if each.right is None):
            return Ruling(sentence=Sentence.SCRIPT)
        undecided = any(each.right is None for each in judged.values())
        if undecided and attempts >= ATTEMPTS_MAX:
            return self._rule_undecided()
        if attempts > 1 and (wrong := self._find_wrong(self._heard[-1:])):
            return Ruling(sentence=Sentence.LEAVE, wrong=wrong, steady=not self._find_fickle())
        if all(each.right == digests[v][owners[v]] for v, each in judged.items()):
            return Ruling(sentence=Sentence.USE, wrong=self._find_wrong(self._heard))
        again = tuple(audit_by_all(a, workers) if a.vrank in differing else a for a in audits)
        return Ruling(sentence=Sentence.AGAIN, audits=again, disputed=tuple(differing))

    def _are_fickle(self, said: Mapping[WorkerId, int]) -> bool:
        """Return whether workers of several machines had several results of one task."""
        fickle = [worker for worker, digest in said.items() if digest == FICKLE]
        return len(fickle if self._view is None else name_machines(self._view, fickle)) > 1

    def _find_wrong(self, attempts: Sequence[Digests]) -> tuple[tuple[WorkerId, int], ...]:
        """Find workers, and tasks, with other bits in these attempts than the last majority's."""
        found = []
        for vrank, each in self._heard[-1].items():
            right = self._judge(each).right
            heard = [attempt.get(vrank, {}) for attempt in attempts]
            liars = {w for said in heard for w, digest in said.items() if digest != right}
            found += [(worker, vrank) for worker in sorted(liars)] if right is not None else []
        return tuple(found)

    def _judge(self, said: Mapping[WorkerId, int]) -> Judgement:
        if len(self._heard) == 1:  # not all have computed it yet
            return judge(said)
        proven = {worker: digest for worker, digest in said.items() if worker not in self._unproven}
        found = judge(proven) if proven else None
        return judge(said) if found is None or found.right is None else found

    def _rule_undecided(self) -> Ruling:
        """Rule without a majority: a worker that contradicts itself is wrong, unless all do."""
        fickle = self._find_fickle()
        if not fickle:
            last = self._heard[-1].items()
            disputed = tuple(vrank for vrank, each in last if self._judge(each).right is None)
            return Ruling(sentence=Sentence.TIE, disputed=disputed, steady=True)
        every = {w for attempt in self._heard for each in attempt.values() for w in each}
        if {worker for worker, _ in fickle} == every:
            return Ruling(sentence=Sentence.UNLIKE)
        return Ruling(sentence=Sentence.LEAVE, wrong=fickle)

    def _find_fickle(self) -> tuple[tuple[WorkerId, int], ...]:
        """Return workers and tasks, where a worker has computed several digests of one task."""
        said: dict[tuple[WorkerId, int], set[int]] = {}
        for attempt in self._heard:
            for vrank, each in attempt.items():
                for worker, digest in each.items():
                    said.setdefault((worker, vrank), set()).add(digest)
        every = said.items()
        return tuple(sorted(key for key, each in every if len(each) > 1 or FICKLE in each))


def _mix(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood 2014): 64 bits that look random, from 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
