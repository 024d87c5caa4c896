"""Which tasks are computed twice, and who was wrong when the bits differ. Pure.

A task is a pure function, so two workers must come to the same bits. Every member of a view makes
the same plan for a step; what differs is computed again by everybody, and the majority decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.types import WorkerId

ATTEMPTS_MAX = 3  # after which the same task gives other bits by its nature


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
    """`right`: the majority's digest; None when there is no majority. `wrong`: who has another."""

    right: int | None
    wrong: tuple[WorkerId, ...] = ()


def plan(
    seed: int, step: int, owners: Sequence[WorkerId], workers: Sequence[WorkerId], share: float
) -> tuple[Audit, ...]:
    """A `share` of the step's tasks, on average over many steps."""
    if share <= 0 or len(workers) < 2:
        return ()
    limit = int(share * (1 << 32))
    found = []
    for vrank, owner in enumerate(owners):
        dice = _mix(_mix(_mix(seed) ^ step) ^ vrank)
        if dice & 0xFFFFFFFF < limit:
            others = [worker for worker in workers if worker != owner]
            found.append(Audit(vrank, owner, (others[(dice >> 32) % len(others)],)))
    return tuple(found)


def by_all(audit: Audit, workers: Sequence[WorkerId]) -> Audit:
    """The same task, to be computed by everybody."""
    return Audit(audit.vrank, audit.owner, tuple(w for w in workers if w != audit.owner))


def judge(digests: Mapping[WorkerId, int]) -> Judgement:
    """Of one task, as each of these workers has computed it."""
    (most, count), *_ = Counter(digests.values()).most_common(1)
    if 2 * count <= len(digests):
        return Judgement(right=None)
    wrong = tuple(worker for worker, digest in sorted(digests.items()) if digest != most)
    return Judgement(right=most, wrong=wrong)


def _mix(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood 2014): 64 bits that look random, from 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
