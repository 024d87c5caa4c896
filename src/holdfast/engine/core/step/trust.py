"""Knows since when a member's work, or its copy of the state, may be wrong. Pure.

Audits see gradients, fingerprints see the state, each of them only a share in a step. So when a
member turns out to be wrong, it may have been so for a while, and the others have used its work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Names the first steps that may be wrong.

    `sums`: the first step whose sum may be wrong; None if all were audited.

    `saved`: the first step after which a copy of the state may be wrong.
    """

    sums: int | None
    saved: int


@dataclass(slots=True)
class _Seen:
    """Keeps the audits and comparisons of one member."""

    incarnation: Incarnation
    joined: int  # with a state that all have compared
    agreed: int  # until this step no audit has found it wrong that has looked
    covered: int  # from this step on all its tasks were audited
    left: int | None = None  # the step in which it was suspended


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
        for worker in dict.fromkeys(owners):  # others were not looked at
            seen = self._seen[worker]
            if seen.covered <= step:
                seen.agreed = step + 1

    def doubt(self, workers: Iterable[WorkerId], step: int, *, diverged: bool) -> Doubt:
        """Find since when workers may be wrong that turn out to be so in the uncommitted `step`.

        Nothing is known here yet of a member that has just joined; others know it.
        `diverged`: their states are; else their gradients, for whatever reason.
        """
        sums, saved = [], [step]
        for seen in (self._seen[worker] for worker in workers if worker in self._seen):
            last = step if seen.left is None else min(step, seen.left)
            compared = max(last - self._cycle, seen.joined) if self._cycle else last
            since = compared if diverged else min(seen.agreed, compared)
            saved.append(since)
            sums += [since] if seen.covered > since else []
        return Doubt(sums=min(sums, default=None), saved=min(saved))
