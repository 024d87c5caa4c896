"""Decides which results count in a step that does not wait for all. Pure.

With backup workers a step is complete once all but a few members are done with all their tasks;
later results are dropped (Chen, Monga, Bengio, Jozefowicz, "Revisiting Distributed
Synchronous SGD", arXiv:1604.00981, 2016).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from holdfast.engine.core.ground.effects import SendCounted, SendDone
from holdfast.engine.core.ground.events import FIRST, CountSettled, MemberDone, StepKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View


def find_counted(policy: BackupPolicy, members: int, done: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks whose results count, once enough members are done; () until then.

    `done`: how many samples each of them has used. A step without a sample would be none.
    """
    enough = len(done) >= policy.needed_members(members) and any(done.values())
    return tuple(sorted(done)) if enough or len(done) == members else ()


class DropTally:
    """Counts dropped samples in a loop, in the steps of one worker, for the event log."""

    def __init__(self) -> None:
        self.steps = 0  # with something dropped
        self._first = 0  # the first such step
        self._samples = 0
        self._steps_of: Counter[WorkerId] = Counter()

    def note(self, step: int, workers: Collection[WorkerId], samples: int) -> bool:
        """Count a step that dropped these workers' results; return whether to log it (seldom)."""
        if not self.steps:
            self._first = step
        self.steps += 1
        self._samples += samples
        self._steps_of.update(workers)
        return self.steps & (self.steps - 1) == 0

    def __str__(self) -> str:
        each = ", ".join(f"of worker {w} in {n}" for w, n in sorted(self._steps_of.items()))
        since = f"since step {self._first}, in {self.steps} steps"
        return f"{self._samples} samples were dropped {since} ({each})"


class Settlement:
    """Settles step by step which members' results count, for one member of a view.

    A member that has done all its tasks reports that to the member of rank 0, which names the ranks
    that count to all members as soon as enough are done. That must be known before any sum begins.
    """

    def __init__(self, policy: BackupPolicy, rank: int, size: int) -> None:
        self._policy = policy
        self._rank = rank
        self._size = size
        self._step = 0  # the one under way
        self._said = -1  # the newest step that this member has called done
        self._done: dict[int, dict[int, int]] = {}  # by step and rank: samples used
        self._counted: dict[int, tuple[int, ...]] = {}  # by step: the ranks that count

    def begin(self, step: int) -> None:
        """Forget the settlements of earlier steps."""
        self._step = step
        for table in (self._done, self._counted):
            for old in [s for s in table if s < step]:
                del table[old]

    def counted_ranks(self, step: int) -> tuple[int, ...] | None:
        """Return the ranks whose results of the step count; None while that is not settled."""
        return self._counted.get(step)

    def drops(self, step: int) -> bool:
        """Return whether it is known that this member's results of the step do not count."""
        return step in self._counted and self._rank not in self._counted[step]

    def record_own_done(self, step: int) -> bool:
        """Record that this member is done with a step; whether that is news."""
        news = self._said < step and step not in self._counted
        self._said = max(self._said, step)
        return news

    def record_done(self, rank: int, step: int, samples: int) -> tuple[int, ...]:
        """Record that a member is done; return who counts if that settles it. At rank 0 only."""
        if step < self._step or step in self._counted:
            return ()
        done = self._done.setdefault(step, {})
        done[rank] = samples
        counted = find_counted(self._policy, self._size, done)
        if counted:
            self._counted[step] = counted
        return counted

    def record_settled(self, step: int, ranks: tuple[int, ...]) -> None:
        """Record the ranks whose results count, as rank 0 has settled."""
        self._counted[step] = ranks


class CountedMembers:
    """Settles which members' results of a step count, together with the first member of the view.

    Without backup workers the results of all members count.
    """

    def __init__(self, policy: BackupPolicy, standing: Standing) -> None:
        self._policy = policy
        self._standing = standing
        self._settlement: Settlement | None = None
        self._view: View

    def enter(self, view: View) -> None:
        """Begin another view, in which no step is settled yet."""
        self._view = view
        if self._policy.workers:
            rank = view.rank(self._standing.me)
            self._settlement = Settlement(self._policy, rank, len(view.members))

    def settle(self, step: OpenStep) -> Sequence[int] | None:
        """Return the ranks whose results of the step count; None while that is not settled."""
        settlement = self._settlement
        if settlement is None or step.kind is not StepKind.GRADIENTS:
            return range(len(self._view.members))
        settlement.begin(step.index)
        used = step.count_used(self._standing.status.hosted)
        if used is not None and settlement.record_own_done(step.index):
            self._report_done(step.index, used)
        return settlement.counted_ranks(step.index)

    def _report_done(self, step: int, used: int) -> None:
        number = self._view.number
        if self._view.rank(self._standing.me) == FIRST:
            self.record(MemberDone(number, FIRST, step, used))
        else:
            self._standing.order(SendDone(number, step, used))

    def record(self, event: MemberDone | CountSettled) -> bool:
        """Take in a member's report, as the first member, or the ranks that the first has settled.

        Return whether the event is from another member.
        """
        settlement = self._settlement
        if isinstance(event, CountSettled):
            if settlement is not None:
                settlement.record_settled(event.step, event.ranks)
            return True
        if settlement is None:
            return False
        counted = settlement.record_done(event.rank, event.step, event.samples)
        if counted and len(self._view.members) > 1:
            self._standing.order(SendCounted(self._view.number, event.step, counted))
        return event.rank != FIRST

    def drops(self, step: int) -> bool:
        """Return whether this member's results of the step are known not to count."""
        return self._settlement is not None and self._settlement.drops(step)
