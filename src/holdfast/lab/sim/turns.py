"""Simulates exchanges in turns: all-gathers by dissemination, and sums along the tree.

The plans are the product's own (core/spread_turns.py, core/sum_plan.py). Each member goes through
its turns by itself: it sends its messages of the turn, waits for the messages of its peers, and
begins the next turn. A process may die, freeze or be cut off between two turns. Then some members
complete an exchange, and the rest never do. The members of a view share one table of records, so a
message costs the same whatever the number of records in it.

A plan of a sum becomes a list of numbered slots, once for many steps. A simulated value stands for
all elements of a piece, so each piece that a member has, receives or computes takes one slot. A
part of a sum lies in the slots that its reader names; slot 0 stands for elements without a slot.

Each message carries the names of its view, exchange and pieces, as its sender knows them. A member
that uses a message compares them with its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.engine.core import tree
from holdfast.engine.core.spread_turns import plan_turns
from holdfast.engine.core.sum_plan import WHOLE, Level, Message, Part, SumPlan, SumPlans
from holdfast.engine.core.tree import Node
from holdfast.engine.core.types import WorkerId
from holdfast.lab.sim.arithmetic import MISSING, Key, add, mix
from holdfast.lab.sim.groups import Group, TurnOf, What
from holdfast.lab.sim.seams import Actor, ProcessWorld
from holdfast.lab.sim.wrong_bits import Violation

Slots = tuple[int, ...]
NOWHERE = 0  # the slot of elements that a member does not have
_Bounds = tuple[float, float]  # a part; equal fractions are equal floats, and these are quick
# Parts, each with its slot.
_Held = list[tuple[_Bounds, int]]
HOSTINGS_KEPT = 4
NONE_AWAITED = -1
REPEATED_WITHIN_S = 4.0  # a message that comes twice comes again within this time
Send = Callable[[Actor, Group, Key, TurnOf, Any], None]


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


def check_piece(member: Key, wanted: tuple[Any, ...], stamp: tuple[Any, ...]) -> None:
    """Check that a message is of the view, and of the step or gather, in which it is used."""
    if stamp != wanted:
        raise Violation(f"worker {member} uses a message of {stamp} for {wanted}")


def check_record_range(member: Key, wanted: int, first: int) -> None:
    """Check that the records in a message follow those that the member has."""
    if first != wanted:
        raise Violation(f"worker {member} gets records from rank {first} on, and lacks {wanted}")


def check_records(
    member: Key, what: What, keys: Sequence[Key], held: int, records: Mapping[Key, Any]
) -> None:
    """Check that a member ends a gather with one record of each member."""
    if held != len(keys) or len(records) != held:
        raise Violation(
            f"worker {member} ends gather {what} with {held} records of {len(keys)} members, of "
            f"whom {len(records)} have given one"
        )


def check_total(member: Key, step: int, total: int, right: int) -> None:
    """Compare a member's sum with the fold of all members' contributions."""
    if total != right:
        raise Violation(f"worker {member} has summed step {step} otherwise than the tree does")


class ExchangeStriker(Protocol):
    """Strikes processes between two turns of an exchange."""

    active: bool

    def strikes_exchange(self, process: Actor, place: str, peer: Actor | None) -> None: ...


class TurnWorld(ProcessWorld, Protocol):
    """Is the world around exchanges."""

    @property
    def faults(self) -> ExchangeStriker: ...


class TurnedExchange(ABC):
    """Carries out one member's part in one exchange."""

    place = ""  # the kind of the exchange, as faults between its turns name it

    def __init__(self, turns: Turns, process: Actor, group: Group, what: What, last: int) -> None:
        self.turn = 0
        self._turns = turns
        self._process = process
        self._group = group
        self._what = what
        self._last = last  # the number of turns

    def go_on(self) -> None:
        """Send what the present turn needs, and take all turns that are complete."""
        group = self._group
        if not group.open:
            return
        if self.turn < self._last:
            self._send()
        self.advance()

    def advance(self) -> None:
        """Take the turns whose messages are here."""
        process, group = self._process, self._group
        while self.turn < self._last:
            if not self._take():
                return
            self.turn += 1
            if self.turn < self._last:
                self._turns.strike(process, group, self.place, self._next_peer())
                if not (process.alive and group.open):
                    return
                if not process.is_running:
                    process.deliver(self.go_on, ())
                    return
                self._send()
        group.finish(self._what)
        self._finish()

    @abstractmethod
    def _send(self) -> None:
        """Send the messages of the present turn."""

    @abstractmethod
    def _take(self) -> bool:
        """Take in the messages of the present turn; return False while one is missing."""

    @abstractmethod
    def _next_peer(self) -> int | None:
        """Return a rank with which this member exchanges in the present turn."""

    @abstractmethod
    def _finish(self) -> None: ...


class TurnedGather(TurnedExchange):
    """Gathers a record of each member, in turns in which the number of known ones doubles."""

    place = "gather"

    def __init__(
        self, turns: Turns, process: Actor, group: Group, what: What, records: dict[Key, Any]
    ) -> None:
        self._rank, self._size = group.rank_of(process.key), len(group.keys)
        self._plan = plan_turns(self._rank, self._size)
        super().__init__(turns, process, group, what, len(self._plan))
        self._records = records  # those given so far, by any member
        self._held = 1  # records that have come here, from this member's own rank on
        self._stamp = (int(group.number), *what)

    @property
    def awaited_rank(self) -> int:
        """Return the rank whose message of the present turn is missing."""
        return self._plan[self.turn].get_from if self.turn < self._last else NONE_AWAITED

    def _send(self) -> None:
        turn, group = self._plan[self.turn], self._group
        body = (self._stamp, self._rank, min(turn.records, self._held))
        self._turns.send(
            self._process, group, group.keys[turn.give_to], (*self._what, self.turn), body
        )

    def _take(self) -> bool:
        turn, group = self._plan[self.turn], self._group
        body = group.come.pop(((*self._what, self.turn), group.keys[turn.get_from]), None)
        if body is None:
            return False
        stamp, first, count = body
        check_piece(self._process.key, self._stamp, stamp)
        check_record_range(self._process.key, (self._rank + self._held) % self._size, first)
        self._held += count
        return True

    def _next_peer(self) -> int:
        return self._plan[self.turn].give_to

    def _finish(self) -> None:
        check_records(self._process.key, self._what, self._group.keys, self._held, self._records)
        self._turns.end_records(self._group, self._what)
        self._group.heard[self._what] = self._records
        self._process.receive(self._what)


class LevelSum(TurnedExchange):
    """Sums the members' tokens level by level; `total`: the whole sum, once it is here."""

    place = "sum"

    def __init__(
        self, turns: Turns, process: Actor, group: Group, what: What, step: int, hosting: Hosting
    ) -> None:
        self._plan = hosting.of(group.rank_of(process.key))
        super().__init__(turns, process, group, what, len(self._plan.turns))
        self._vranks = len(hosting.owners)
        self._stamp = (int(group.number), step)
        self._values: list[int] = []
        self.total: int | None = None

    def begin(self, tokens: Mapping[int, int]) -> None:
        """Begin with this member's own tokens, by virtual rank."""
        sums = sum_nodes(tokens, self._vranks)
        missing = [node for node in self._plan.nodes if node not in sums]
        if missing:
            raise Violation(f"worker {self._process.key} has no sums of the tree nodes {missing}")
        self._values = [MISSING, *(sums[node] for node in self._plan.nodes)]
        self.go_on()

    def _send(self) -> None:
        group, values = self._group, self._values
        for each in self._plan.turns[self.turn].sends:
            body = (self._stamp, each.pieces, [read(values, slots) for slots in each.slots])
            name = (*self._what, each.number)
            self._turns.send(self._process, group, group.keys[each.rank], name, body)

    def _take(self) -> bool:
        turn, keys = self._plan.turns[self.turn], self._group.keys
        come, values = self._group.come, self._values
        names = [((*self._what, each.number), keys[each.rank]) for each in turn.receives]
        if not all(name in come for name in names):
            return False
        for name, each in zip(names, turn.receives, strict=True):
            stamp, pieces, found = come.pop(name)
            check_piece(self._process.key, (self._stamp, each.pieces), (stamp, pieces))
            values += found
        for left, right in turn.additions:
            values.append(add(read(values, left), read(values, right)))
        return True

    def _next_peer(self) -> int | None:
        turn = self._plan.turns[self.turn]
        return turn.sends[0].rank if turn.sends else None

    def _finish(self) -> None:
        self.total = read(self._values, self._plan.total)
        self._process.receive(self._what)


class Turns:
    """Begins the exchanges of all processes, and carries their messages by way of `send`."""

    def __init__(self, world: TurnWorld, send: Send) -> None:
        self._world = world
        self._send = send
        # By view and gather: the records given so far, and the number of members that lack some.
        self._records: dict[tuple[int, What], dict[Key, Any]] = {}
        self._waiting: dict[tuple[int, What], int] = {}
        self._hostings: dict[tuple[int, int], Hosting] = {}  # by view and step

    def gather(self, process: Actor, group: Group, what: What, record: object) -> TurnedGather:
        """Spread a record to all members. `receive` of a member gets all records at once."""
        name = (int(group.number), what)
        records = self._records.setdefault(name, {})
        records[process.key] = record
        gathering = TurnedGather(self, process, group, what, records)
        group.under_way[what] = gathering
        gathering.go_on()
        return gathering

    def end_records(self, group: Group, what: What) -> None:
        """Forget the records of a gather, once every member has them."""
        name = (int(group.number), what)
        left = self._waiting[name] = self._waiting.get(name, len(group.keys)) - 1
        if not left:
            del self._records[name], self._waiting[name]

    def start_sum(
        self,
        process: Actor,
        group: Group,
        what: What,
        step: int,
        owners: tuple[WorkerId, ...],
    ) -> LevelSum:
        """Return this member's part in a sum; `owners`: the hosts of the virtual ranks."""
        found = LevelSum(self, process, group, what, step, self._hosting(group, step, owners))
        group.under_way[what] = found
        return found

    def _hosting(self, group: Group, step: int, owners: tuple[WorkerId, ...]) -> Hosting:
        name, kept = (int(group.number), step), self._hostings
        found = kept.get(name)
        if found is None:
            workers = group.view.workers
            alike = (h for h in kept.values() if (h.owners, h.workers) == (owners, workers))
            found = kept[name] = next(alike, None) or Hosting(workers, owners)
            if len(kept) > HOSTINGS_KEPT:
                del kept[next(iter(kept))]
        return found

    def send(self, process: Actor, group: Group, key: Key, name: TurnOf, body: object) -> None:
        """Send the message of a turn to one member. Some messages are repeated later."""
        self._send(process, group, key, name, body)
        world = self._world
        repeats = world.options.repeats
        if repeats and world.faults.active and world.rng.random() < repeats:
            receiver = world.processes.get(key)
            if receiver is not None:
                later_s = world.rng.uniform(0.0, REPEATED_WITHIN_S)
                arguments = (receiver, group.number, name, process.key, body)
                world.call_later(later_s, receiver.deliver, handle_turn, arguments)

    def strike(self, process: Actor, group: Group, place: str, peer: int | None) -> None:
        """Give faults a chance to strike between two turns."""
        world = self._world
        other = world.processes.get(group.keys[peer]) if peer is not None else None
        world.faults.strikes_exchange(process, place, other)


def handle_turn(process: Actor, number: int, name: TurnOf, sender: Key, body: object) -> None:
    """Give the message of one turn to its receiver, whose exchange may not have begun yet."""
    group = process.open_group(number)
    if group is None or group.is_over(name[0], name[1]):
        return
    group.come[name, sender] = body
    exchange = group.under_way.get(name[:2])
    if exchange is not None:
        exchange.advance()
