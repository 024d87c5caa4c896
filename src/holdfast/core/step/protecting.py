"""Decides one member's part in protecting the state in the nodes' memory. Pure.

Before it votes for a step it puts its pieces of the reduced gradient into its node's memory. So
whatever is committed can be applied again to an older state, as long as enough pieces are left. At
a boundary on which all agree it puts its pieces of the state there as well. That state counts once
all members have done so, and the step that follows has compared the states: then everything older
may go.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.redundancy import Piece, Redundancy
from holdfast.core.step.effects import ForgetProtected, Outcome, ProtectState
from holdfast.core.step.events import EventNoted
from holdfast.core.types import View, WorkerId


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


class Protecting:
    """Keeps what was agreed on and done. `every`: steps from one protected state to the next."""

    def __init__(self, every: int) -> None:
        self.staged = 0  # the newest state, after so many steps, whose pieces are in memory, or
        # less than 0 for one that could not be copied
        self.full = False  # there is hardly room for further gradients here
        self._every = every
        self._view: View | None = None
        self._last = 0  # that is protected, or that this member began with
        self._agreed: int | None = None  # the state after so many steps is to be protected
        self._pending: int | None = None  # it was copied, and does not count yet

    @property
    def active(self) -> bool:
        """Tell whether anything is protected in the present view."""
        return self._view is not None and bool(self._view.ring)

    def enter(self, view: View) -> None:
        """Begin another view: what was not put into memory in the old one never will be."""
        before = self._view
        self._view, self._agreed, self._pending, self.staged = view, None, None, 0
        self.full = False
        if before is None or before.ring != view.ring:
            self._last = -self._every  # pieces are missing, or on other nodes

    def opinion(self, step: int, leads: bool) -> bool:
        """Say whether the state after this step should be protected."""
        under_way = self._agreed is not None or self._pending is not None
        due = step + 1 >= self._last + (1 if self.full else self._every)
        return leads and self.active and not under_way and due

    def postpone(self, step: int) -> None:
        """Note that the script did not rest after `step` steps: do so at the next boundary."""
        if self._agreed == step:
            self._agreed += 1

    def looks_at_all(self, step: int) -> bool:
        """Tell whether the state after `step` steps is to be compared, since it is protected."""
        return step in (self._agreed, self._pending)

    def at_boundary(self, step: int) -> list[Outcome]:
        """Return the order to copy, if the state as it is now was agreed on."""
        if self._agreed is None or self._view is None or step < self._agreed:
            return []
        agreed, self._agreed = self._agreed, None
        if agreed != step:  # the boundary was between two loops, where nothing is copied
            self._last = -self._every
            return []
        self._pending = step
        return [ProtectState(step, self._view)]

    def copied(self, step: int, problem: str) -> list[Outcome]:
        """Note that this member's pieces of a state are in memory, or why not."""
        if self._pending == step:
            self.staged = -step if problem else step
        text = f"step {step} is not protected: {problem}"
        return [EventNoted("memory", text)] if problem else []

    def voted(self, step: int, staged: Sequence[int], *, protect: bool) -> list[Outcome]:
        """Note that `step` is committed; `staged`: the newest state that each member has copied.

        `protect`: the state after this step is to be protected, too.
        """
        if protect:
            self._agreed = self._last = step + 1
        pending = self._pending
        if pending is None or self._view is None or step < pending:
            return []
        if -pending in staged:
            self._pending, self._last = None, step  # tried again, but not at once
        if any(each != pending for each in staged):
            return []
        self._pending = None
        return [ForgetProtected(self._view.number, pending)]
