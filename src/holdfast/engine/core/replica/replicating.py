"""Decides one member's part in replicating the state in the nodes' memory. Pure.

Before it votes for a step it puts its pieces of the reduced gradient into its node's memory. So
each committed step can be applied again to an older state, as long as enough pieces are left. At a
boundary on which all agree it puts its pieces of the state there as well. That state counts once
all members have done so, and the next step has compared the states: then all older pieces may go.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from holdfast.engine.core.ground.effects import CopyState, Forget, Outcome
from holdfast.engine.core.ground.events import EventNoted, SinkKind
from holdfast.engine.core.ground.vote import Tally
from holdfast.engine.core.redundancy import Piece, Redundancy
from holdfast.engine.core.replica.intervals import STEPS_KEPT, CopyCost, Exposure
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View


def pieces_of(
    view: View, worker: WorkerId, redundancy: Redundancy, shard: int = 0, place: int = 0
) -> tuple[Piece, ...]:
    """Return the pieces of a shard that a member keeps on one of its nodes, by the node's place.

    Members that share the node share them out.
    """
    me = view.member(worker)
    if me is None or me.nodes[place] not in view.ring:
        return ()
    size, at = len(view.ring), view.ring.index(me.nodes[place])
    beside = [member.worker for member in view.members if me.nodes[place] in member.nodes]
    parts = _parts(view, shard)
    firsts = ((at - number) % size for number in range(redundancy.pieces_on(size)))
    found = (Piece(parts[first], n) for n, first in enumerate(firsts) if first in parts)
    return tuple(p for p in found if beside[p.part % len(beside)] == worker)


def parts_of(view: View, shard: int) -> int:
    """Return into how many parts a shard is cut: as many as nodes of the ring hold it."""
    return len(_parts(view, shard))


def _parts(view: View, shard: int) -> dict[int, int]:
    """Return the part that begins at a place of the ring, where a node holds the shard."""
    if not any(member.further for member in view.members):
        return dict(zip(range(len(view.ring)), range(len(view.ring)), strict=True))
    holders = frozenset(member.holder(shard) for member in view.members)
    places = [place for place, agent in enumerate(view.ring) if agent in holders]
    return {place: part for part, place in enumerate(places)}


class Replicating:
    """Keeps agreements and progress; `exposure` finds the steps between two states."""

    def __init__(self, exposure: Exposure) -> None:
        #: The number of steps before the newest state whose pieces are in memory; negative if that
        #: state could not be copied.
        self.staged = 0
        self.full = False  # there is hardly room for further gradients here
        self._exposure = exposure
        self._view: View | None = None
        self._last: int | None = 0  # steps before the replicated state, or this member's first one
        self._agreed: int | None = None  # steps before the state to be replicated next
        self._pending: int | None = None  # it was copied, and does not count yet
        self._counts: int | None = None  # all have replicated it: older ones may go
        self._voted_at: float | None = None  # for a step that the script applies now
        # Seconds that the script took to apply steps.
        self._applying: deque[float] = deque(maxlen=STEPS_KEPT)
        self._cost = CopyCost()

    @property
    def is_active(self) -> bool:
        """Return whether nodes keep pieces of the state in the present view."""
        return self._view is not None and bool(self._view.ring)

    def enter(self, view: View) -> None:
        """Begin another view: pieces that the old one lacks are never put into memory."""
        before = self._view
        self._view, self._agreed, self._pending, self.staged = view, None, None, 0
        self.full, self._voted_at, self._counts = False, None, None
        if before is None or before.ring != view.ring:
            self._last = None  # pieces are missing, or on other nodes

    def opinion(self, step: int, leads: bool) -> bool:
        """Return whether the state after this step should be replicated."""
        under_way = self._agreed is not None or self._pending is not None
        return leads and self.is_active and not under_way and self._is_due(step + 1)

    def _is_due(self, step: int) -> bool:
        if self._last is None:
            return True
        apply_s = median(self._applying or [0.0])
        every = 1 if self.full else self._exposure.choose_steps(self._cost.cost_s, apply_s)
        return step >= self._last + every

    def postpone(self, step: int) -> None:
        """Record that the script did not rest after `step` steps: copy at the next boundary."""
        if self._agreed == step:
            self._agreed += 1

    def looks_at_all(self, step: int) -> bool:
        """Return whether the state after `step` steps is compared because it is replicated."""
        return step in (self._agreed, self._pending)

    def next_copy(self, step: int, now: float) -> list[Outcome]:
        """Return the order to copy, if the state as it is now was agreed on."""
        if self._voted_at is not None:
            self._applying.append(now - self._voted_at)
            self._voted_at = None
        if self._agreed is None or self._view is None or step < self._agreed:
            return []
        agreed, self._agreed = self._agreed, None
        if agreed != step:  # no state is copied between two loops
            self._last = None
            return []
        self._pending = step
        return [CopyState(SinkKind.MEMORY, step, self._view)]

    def record_pause(self, now: float, stall_s: float) -> None:
        """Record that the script stood still for a copy; its pieces are made from now on."""
        self._cost.begin(now, stall_s)

    def record_copy(self, step: int, problem: str) -> list[Outcome]:
        """Record that this member's pieces of a state are in memory, or why not."""
        if self._pending == step:
            self.staged = -step if problem else step
        text = f"step {step} is not protected: {problem}"
        return [EventNoted("memory", text)] if problem else []

    def record_votes(self, step: int, tally: Tally, now: float) -> None:
        """Take in the votes of all members on replicated states, before `step` is committed."""
        self._voted_at = now
        if tally.protect:
            self._agreed = self._last = step + 1
        self._count_staged(step, tally)
        self._cost.record_step(now, busy=self._pending is not None)

    def _count_staged(self, step: int, tally: Tally) -> None:
        """Find whether all members have put the pending state into memory."""
        pending = self._pending
        if pending is None or step < pending:
            return
        if -pending in tally.staged:
            self._pending, self._last = None, step  # tried again, but not at once
        elif all(each == pending for each in tally.staged):
            self._pending, self._counts = None, pending

    def forget_older(self) -> list[Outcome]:
        """Return the order to drop older states, if one counts since the last vote.

        It follows the mark of the commit, by which the newer state counts.
        """
        counts, self._counts = self._counts, None
        if counts is None or self._view is None:
            return []
        return [Forget(SinkKind.MEMORY, self._view.number, counts)]
