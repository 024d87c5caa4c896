"""Turns a member's plan of a sum into a list of numbered slots, once for many steps.

The plan itself is the product's (core/sum_plan.py). A simulated value stands for all elements of a
piece, so each piece that a member has, receives or computes takes one slot. What reads a part of a
sum names the slots in which that part lies; slot 0 stands for elements that no slot has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core import tree
from holdfast.engine.core.sum_plan import WHOLE, Level, Message, Part, SumPlan, SumPlans
from holdfast.engine.core.tree import Node
from holdfast.engine.core.types import WorkerId
from holdfast.lab.sim.arithmetic import add, mix

Slots = tuple[int, ...]
NOWHERE = 0  # the slot of elements that a member does not have
_Bounds = tuple[float, float]  # a part; equal fractions are equal floats, and these are quick
_Held = list[tuple[_Bounds, int]]  # parts, and the slots in which they are


@dataclass(frozen=True, slots=True)
class PieceMessage:
    """Describes the message to, or from, one member in one turn.

    `number`: how many went the same way before it. `pieces`: a number for each piece in it, the
    same at both ends. `slots`: where the sender has each of them.
    """

    rank: int
    number: int
    pieces: tuple[int, ...]
    slots: tuple[Slots, ...]


@dataclass(frozen=True, slots=True)
class SumTurn:
    """Describes one exchange, and the slots of both operands of each addition after it."""

    sends: tuple[PieceMessage, ...]
    receives: tuple[PieceMessage, ...]
    additions: tuple[tuple[Slots, Slots], ...] = ()


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Describes one member's part in the sums of a view, until its hosting changes.

    `nodes`: the nodes that it hosts, which take the first slots. `total`: where the whole sum is.
    """

    nodes: tuple[Node, ...]
    turns: tuple[SumTurn, ...]
    total: Slots


def read(values: Sequence[int], slots: Slots) -> int:
    """Return the value of a part; of pieces that differ, a value that no right sum has."""
    found = values[slots[0]]
    if len(slots) > 1 and any(values[slot] != found for slot in slots):
        return mix([values[slot] for slot in slots])
    return found


def sum_nodes(tokens: Mapping[int, int], vranks: int) -> dict[Node, int]:
    """Sum a member's own tokens up to its widest tree nodes. `tokens`: by virtual rank."""
    sums: dict[Node, int] = {}
    for vrank, token in tokens.items():
        tree.merge(sums, (vrank, 1), token, vranks, add)
    return sums


class Hosting:
    """Keeps the plans of all members, as long as `owners` host the virtual ranks."""

    def __init__(self, workers: Sequence[WorkerId], owners: tuple[WorkerId, ...]) -> None:
        self.workers = workers
        self.owners = owners
        self._vranks = len(owners)
        hosted: dict[WorkerId, list[int]] = {worker: [] for worker in workers}
        for vrank, worker in enumerate(owners):
            hosted[worker].append(vrank)
        self._nodes = [tree.maximal_nodes(each, self._vranks) for each in hosted.values()]
        self._plans = SumPlans(self._nodes, self._vranks)
        self._numbers: dict[tuple[Node, _Bounds], int] = {}
        self._made: dict[int, SlotPlan] = {}

    def of(self, rank: int) -> SlotPlan:
        """Return the plan of one member."""
        found = self._made.get(rank)
        if found is None:
            numbering = _Numbering(self._numbers, self._nodes[rank])
            found = self._made[rank] = numbering.number(self._plans.of(rank))
        return found


class _Numbering:
    """Numbers the slots of one member's plan, in the order in which they are filled."""

    def __init__(self, numbers: dict[tuple[Node, _Bounds], int], nodes: tuple[Node, ...]) -> None:
        # The numbers of pieces, the same for all members.
        self._numbers = numbers
        self._nodes = nodes
        self._filled = NOWHERE
        self._sent: dict[int, int] = {}  # messages so far, by receiver
        self._received: dict[int, int] = {}  # messages so far, by sender
        self._partial: dict[Node, _Held] = {}
        self._finished: _Held = []

    def number(self, plan: SumPlan) -> SlotPlan:
        """Return the member's plan with its slots."""
        for node in self._nodes:
            self._fill(self._partial.setdefault(node, []), WHOLE)
        turns = [self._go_up(level) for level in plan.up]
        if plan.own is not None:
            node, _ = plan.own
            self._finished += self._partial.get(node, [])
        turns += [self._go_down(level) for level in plan.down]
        return SlotPlan(self._nodes, tuple(turns), _find(self._finished, _measure(WHOLE)))

    def _go_up(self, level: Level) -> SumTurn:
        partial = self._partial
        sends = self._pack(level.sends, lambda each: partial.get(each.node, []))
        receives = self._pack(level.receives, None)
        for each in _by_peer(level.receives):
            self._fill(partial.setdefault(each.node, []), each.part)
        additions = []
        for addition in level.additions:
            operands = (partial.get(node, []) for node in (addition.left, addition.right))
            where = _measure(addition.part)
            left, right = (_find(held, where) for held in operands)
            additions.append((left, right))
        for addition in level.additions:
            self._fill(partial.setdefault(addition.node, []), addition.part)
        return SumTurn(sends, receives, tuple(additions))

    def _go_down(self, level: Level) -> SumTurn:
        sends = self._pack(level.sends, lambda _: self._finished)
        receives = self._pack(level.receives, None)
        for each in _by_peer(level.receives):
            self._fill(self._finished, each.part)
        return SumTurn(sends, receives)

    def _fill(self, held: _Held, part: Part) -> None:
        self._filled += 1
        held.append((_measure(part), self._filled))

    def _pack(
        self, messages: Sequence[Message], held: Callable[[Message], _Held] | None
    ) -> tuple[PieceMessage, ...]:
        """Join the pieces for each member to one message. `held`: the slot of each piece."""
        packed: dict[int, list[Message]] = {}
        before = self._received if held is None else self._sent
        for each in messages:
            packed.setdefault(each.peer, []).append(each)
        found = []
        for peer, messages_of_peer in packed.items():
            before[peer] = before.get(peer, -1) + 1
            pieces, slots = [], []
            for each in messages_of_peer:
                where = _measure(each.part)
                pieces.append(self._numbers.setdefault((each.node, where), len(self._numbers)))
                if held is not None:
                    slots.append(_find(held(each), where))
            found.append(PieceMessage(peer, before[peer], tuple(pieces), tuple(slots)))
        return tuple(found)


def _measure(part: Part) -> _Bounds:
    """Return the bounds of a part as floats."""
    start, stop = part
    return start.numerator / start.denominator, stop.numerator / stop.denominator


def _by_peer(messages: Sequence[Message]) -> list[Message]:
    """Return messages as `PieceMessage` packs them: those of one member after each other."""
    order = {each.peer: i for i, each in reversed(list(enumerate(messages)))}
    return sorted(messages, key=lambda each: order[each.peer])


def _find(held: _Held, part: _Bounds) -> Slots:
    """Return the slots in which a part lies, and NOWHERE first if elements of it are missing."""
    start, stop = part
    found, at, is_whole = [], start, True
    for (begins, ends), slot in held:
        if begins <= start and ends >= stop:
            return (slot,)
    for (begins, ends), slot in sorted(held):
        if begins < stop and ends > start:
            is_whole = is_whole and begins <= at
            at = max(at, ends)
            found.append(slot)
    return tuple(found) if is_whole and at >= stop else (NOWHERE, *found)
