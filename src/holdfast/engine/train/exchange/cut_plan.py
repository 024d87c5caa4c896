"""Cuts a plan of sums for a buffer of some size: elements, and places in its spare memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.core.sum_plan import Addition, Level, Message, SumPlan, cut
from holdfast.engine.core.tree import Node

PIECE_ALIGN = 64  # elements; pieces start on cache lines


@dataclass(frozen=True, slots=True)
class CutMessage:
    """Describes elements of a node's sum that travel to, or come from, the rank `peer`."""

    peer: int
    node: Node
    where: slice


@dataclass(frozen=True, slots=True)
class Side:
    """Describes one side of an addition: elements of the sum of the node's child `node`.

    If other ranks own some of them, they are received into `room`, a part of the spare
    memory, and one's `own` ones are copied there. Without a room they are used where they are.
    """

    node: Node
    room: slice | None
    come: tuple[CutMessage, ...]
    own: slice | None


@dataclass(frozen=True, slots=True)
class CutAddition:
    """Describes the elements `where` of a node's sum, which this rank computes.

    `out`: the place of the sum in the spare memory; None: in the buffer itself.
    """

    node: Node
    where: slice
    left: Side
    right: Side
    out: slice | None


@dataclass(frozen=True, slots=True)
class CutLevel:
    """Describes one exchange of partial sums, and the additions that follow."""

    sends: tuple[CutMessage, ...]
    additions: tuple[CutAddition, ...]


@dataclass(frozen=True, slots=True)
class CutExchange:
    """Describes one exchange of finished sums."""

    sends: tuple[CutMessage, ...]
    receives: tuple[CutMessage, ...]


@dataclass(frozen=True, slots=True)
class CutPlan:
    """Is a plan for a buffer of `numel` elements, with `beside` elements of spare memory.

    `whole`: the node that holds the sum of all, if this rank alone computes it.
    """

    numel: int
    beside: int
    up: tuple[CutLevel, ...]
    down: tuple[CutExchange, ...]
    whole: Node | None

    @classmethod
    def of(cls, plan: SumPlan, numel: int) -> CutPlan:
        """Cut a plan for a buffer."""
        rooms = _Rooms()
        root = plan.own[0] if plan.own is not None else None
        up = [_cut_level(level, numel, root, rooms) for level in plan.up]
        down = []
        for level in plan.down:
            sends, receives = _cut_all(level.sends, numel), _cut_all(level.receives, numel)
            if sends or receives:
                down.append(CutExchange(sends, receives))
        return cls(numel, rooms.taken, tuple(up), tuple(down), None if plan.up else root)


class _Rooms:
    """Divides the spare memory of a buffer."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, size: int) -> slice:
        start, self.taken = self.taken, self.taken + size
        return slice(start, self.taken)


def _cut_level(level: Level, numel: int, root: Node | None, rooms: _Rooms) -> CutLevel:
    come = _cut_all(level.receives, numel)
    additions = []
    for each in level.additions:
        where = cut(each.part, numel, PIECE_ALIGN)
        if where.start < where.stop:
            additions.append(_cut_addition(each, where, come, rooms, is_root=each.node == root))
    return CutLevel(_cut_all(level.sends, numel), tuple(additions))


def _cut_addition(
    addition: Addition, where: slice, come: Sequence[CutMessage], rooms: _Rooms, *, is_root: bool
) -> CutAddition:
    left, right = (
        _cut_side(child, where, [m for m in come if m.node == child], rooms)
        for child in (addition.left, addition.right)
    )
    out = None if is_root else rooms.take(where.stop - where.start)
    return CutAddition(addition.node, where, left, right, out)


def _cut_side(child: Node, where: slice, come: Sequence[CutMessage], rooms: _Rooms) -> Side:
    """Find the elements that peers send; the rest is one range of this rank's own."""
    if not come:
        return Side(child, None, (), where)
    size = where.stop - where.start
    rest = size - sum(m.where.stop - m.where.start for m in come)
    own = None
    if rest:
        ends = {m.where.stop for m in come} | {where.start}
        starts = {m.where.start for m in come}
        begin = min(end for end in ends if end not in starts and end < where.stop)
        own = slice(begin, begin + rest)
    return Side(child, rooms.take(size), tuple(come), own)


def _cut_all(messages: Iterable[Message], numel: int) -> tuple[CutMessage, ...]:
    """Cut messages; those without an element are left out, on both sides."""
    every = (CutMessage(m.peer, m.node, cut(m.part, numel, PIECE_ALIGN)) for m in messages)
    return tuple(m for m in every if m.where.start < m.where.stop)
