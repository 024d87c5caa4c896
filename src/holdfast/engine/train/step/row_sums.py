"""Sums sparse gradients exactly, along the canonical tree (core/sum_plan.py), as buckets are.

Each member exchanges with few members, and a piece is a part of the rows of a tree node's sum. For
this the rows are sorted by keys, which are their places, mixed: a part has the rows whose keys are
in a range. Rows that many tasks use are often those with low numbers, and mixing spreads them
evenly over all parts. Every exchange of rows follows an exchange of their numbers.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from holdfast.engine.core import tree
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.ground.events import Doubt
from holdfast.engine.core.sum_plan import WHOLE, Part, SumPlan, overlap, subtract
from holdfast.engine.core.sum_plan import Message as Planned
from holdfast.engine.train.exchange.layout import TAG_ROWS, Layout
from holdfast.engine.train.exchange.seam import Message, Pending, Transport, is_done
from holdfast.engine.train.step.bucket_sums import add_up
from holdfast.engine.train.step.buckets import Flat
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.row_table import Rows, RowTable

_KEYS = 1 << 64  # keys are int64, so the least one is minus half of this
_LOW_HALF = (1 << 32) - 1
# Of the mixing function of degski64 (public domain), as int64: the product of both is 1.
_FACTOR, _INVERSE = 0xD6E8FEB86659FD93 - _KEYS, 0xCFEE444D8B59A89B - _KEYS
Kind = tuple[torch.dtype, torch.device]
_DENSE, _USED = 1, 2  # flags of a piece
_WORDS = 2  # for each piece: the number of its rows, and its flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPiece:
    """Is a part of the rows of a tree node's sum, by key. `is_used`: the node's whole sum has rows.

    Adding pieces gives the same bits as adding the whole sums with `Rows.add`, which takes a sum
    over unchanged if the other one has no rows at all.
    """

    rows: Rows
    is_used: bool

    @classmethod
    def of(cls, rows: Rows) -> RowPiece:
        """Return all rows of a sum, sorted by key."""
        return cls(rows=_sort(mix(rows.places), [rows]), is_used=len(rows.places) > 0)

    def add(self, other: RowPiece) -> RowPiece:
        """Return the sum; this is the left operand."""
        if not self.is_used or not other.is_used:
            return self if self.is_used else other
        return RowPiece(rows=self.rows.merge(other.rows), is_used=True)

    def cut(self, part: Part) -> RowPiece:
        """Return the rows whose keys are in a part, in the same memory."""
        if part == WHOLE:
            return self
        places, values = self.rows.places, self.rows.values
        where = slice(*(_count_before(places, bound) for bound in part))
        rows = Rows(places=places[where], values=values[where], dense=self.rows.dense)
        return RowPiece(rows=rows, is_used=self.is_used)


class NodeRows:
    """Keeps the pieces of one tree node's sum that are here, for all tables of a step."""

    def __init__(self) -> None:
        # In order, and no two of them overlap. The second member has a piece for each table.
        self._pieces: list[tuple[Part, list[RowPiece]]] = []

    def put(self, part: Part, pieces: Sequence[RowPiece]) -> None:
        """Keep the rows of a part, but for rows that are here already."""
        missing = [part]
        for held, _ in self._pieces:
            missing = [each for one in missing for each in subtract(one, held)]
        self._pieces += [(each, _cut_all(pieces, part, each)) for each in missing]
        self._pieces.sort(key=lambda item: item[0])

    def take(self, part: Part) -> list[RowPiece]:
        """Return the rows of a part, by table. InvariantError if some of them are missing."""
        return [_join(pieces) for pieces in self._find(part)]

    def gather(self) -> list[Rows]:
        """Return all rows, sorted by place, by table. InvariantError if some are missing."""
        found = []
        for pieces in self._find(WHOLE):
            parts = [each.rows for each in pieces]
            found.append(_sort(unmix(torch.cat([rows.places for rows in parts])), parts))
        return found

    def _find(self, part: Part) -> list[tuple[RowPiece, ...]]:
        """Return the pieces of a part, by table. InvariantError if some of them are missing."""
        missing, found = [part], []
        for held, pieces in self._pieces:
            common = overlap(part, held)
            if common is not None:
                missing = [each for one in missing for each in subtract(one, held)]
                found.append(_cut_all(pieces, held, common))
        if missing:
            raise InvariantError(f"rows of the parts {missing} of a sum are missing")
        return list(zip(*found, strict=True))


def mix(places: torch.Tensor) -> torch.Tensor:
    """Return a key for each place. No two places have the same key."""
    return _fold_half(_fold_half(places) * _FACTOR) * _FACTOR


def unmix(keys: torch.Tensor) -> torch.Tensor:
    """Return the places of keys."""
    return _fold_half(_fold_half(keys * _INVERSE) * _INVERSE)


def _fold_half(numbers: torch.Tensor) -> torch.Tensor:
    """Change the low half of each number by its high half; done twice, it restores the number."""
    return numbers ^ ((numbers >> 32) & _LOW_HALF)


def _sort(places: torch.Tensor, parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts at these new places, sorted by them."""
    places, order = places.sort()
    values = parts[0].values.new_empty(len(places), *parts[0].values.shape[1:])
    goes_to = torch.empty_like(order)
    goes_to[order] = torch.arange(len(order), device=order.device)
    # Each part is copied to its rows' places: the values are never in memory three times.
    ends = [len(rows.places) for rows in parts]
    for rows, where in zip(parts, goes_to.split(ends), strict=True):
        values[where] = rows.values
    return Rows(places=places, values=values, dense=parts[0].dense)


def _count_before(keys: torch.Tensor, bound: Fraction) -> int:
    """Return the number of keys before a bound of a part."""
    if bound == 1:
        return len(keys)
    first = bound.numerator * _KEYS // bound.denominator - _KEYS // 2
    return int(torch.searchsorted(keys, first))


def _cut_all(pieces: Sequence[RowPiece], held: Part, part: Part) -> list[RowPiece]:
    return [each if part == held else each.cut(part) for each in pieces]


def _join(pieces: Sequence[RowPiece]) -> RowPiece:
    """Return pieces that follow each other as one."""
    if len(pieces) == 1:
        return pieces[0]
    places = torch.cat([each.rows.places for each in pieces])
    values = torch.cat([each.rows.values for each in pieces])
    rows = Rows(places=places, values=values, dense=pieces[0].rows.dense)
    return RowPiece(rows=rows, is_used=pieces[0].is_used)


class RowExchange:
    """Exchanges the pieces of one level of a plan, those of all tables together.

    A peer gets one message of numbers, and one for each type of number in the rows. `leaving`: the
    pieces for each peer, by planned message and table. `coming`: the messages to receive.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        leaving: Mapping[int, Sequence[RowPiece]],
        coming: Iterable[Planned],
    ) -> None:
        # The pieces that have come, by table, once the exchange is complete.
        self.arrived: list[tuple[Planned, list[RowPiece]]] = []
        self._tables = tables
        self._leaving = leaving
        self._coming: dict[int, list[Planned]] = {}
        for each in coming:
            self._coming.setdefault(each.peer, []).append(each)
        # By peer, as [messages, tables, words].
        self._sizes: dict[int, torch.Tensor] = {}
        self._has_sent_rows = False
        self._sent: list[Message] = []  # kept until they have been sent
        self._pending: Pending | None = None

    def begin(self, transport: Transport) -> None:
        """Exchange the numbers of rows."""
        count = len(self._tables)
        for peer, messages in self._coming.items():
            self._sizes[peer] = torch.zeros(len(messages), count, _WORDS, dtype=torch.int64)
        sends = [(peer, _measure(pieces, count)) for peer, pieces in self._leaving.items()]
        self._exchange(transport, sends, list(self._sizes.items()))

    def is_ready(self) -> bool:
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Exchange the rows once their numbers are here; return False once they are here, too."""
        if self._pending is not None:
            self._pending.wait()
        if self._has_sent_rows:
            return False
        self._has_sent_rows = True
        sends: list[Message] = []
        receives: list[Message] = []
        for peer, pieces in self._leaving.items():
            flats = _pack(_tensors_of(pieces))
            current.probe.handle_sending(peer, sum(flat.nbytes for flat in flats))
            sends += [(peer, flat) for flat in flats]
        count = len(self._tables)
        for peer, sizes in self._sizes.items():
            flats, pieces = self._make_room(sizes)
            receives += [(peer, flat) for flat in flats]
            for i, message in enumerate(self._coming[peer]):
                self.arrived.append((message, pieces[i * count : (i + 1) * count]))
        self._exchange(transport, sends, receives)
        return True

    def _make_room(self, sizes: torch.Tensor) -> tuple[list[torch.Tensor], list[RowPiece]]:
        """Return arrays for the messages of a member, and the pieces in them."""
        expected = [
            RowPiece(
                rows=table.make_rows(count, dense=bool(flags & _DENSE)), is_used=flags & _USED > 0
            )
            for message in sizes.tolist()
            for table, (count, flags) in zip(self._tables, message, strict=True)
        ]
        flats = _pack(_tensors_of(expected))
        rest = {_kind_of(flat): flat for flat in flats}
        found = []
        for each in expected:
            places, values = (_take(rest, like) for like in (each.rows.places, each.rows.values))
            rows = Rows(places=places, values=values, dense=each.rows.dense)
            found.append(RowPiece(rows=rows, is_used=each.is_used))
        return flats, found

    def _exchange(
        self, transport: Transport, sends: list[Message], receives: list[Message]
    ) -> None:
        self._sent = sends
        is_empty = not sends and not receives
        self._pending = None if is_empty else transport.exchange(sends, receives, TAG_ROWS)


def _measure(pieces: Sequence[RowPiece], tables: int) -> torch.Tensor:
    """Return the words about pieces that are sent before them, as [messages, tables, words]."""
    words = [
        (len(each.rows.places), _DENSE * each.rows.dense + _USED * each.is_used) for each in pieces
    ]
    return torch.tensor(words, dtype=torch.int64).view(-1, tables, _WORDS)


def _tensors_of(pieces: Iterable[RowPiece]) -> list[torch.Tensor]:
    rows = [each.rows for each in pieces]
    return [t for each in rows for t in (each.places, each.values) if t.numel()]


def _pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one flat tensor for each type of number: few messages in place of many."""
    kinds = dict.fromkeys(map(_kind_of, tensors))
    found = []
    for kind in kinds:
        flats = [t.reshape(-1) for t in tensors if _kind_of(t) == kind]
        found.append(flats[0] if len(flats) == 1 else torch.cat(flats))
    return found


def _kind_of(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.device


def _take(rest: dict[Kind, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Take the next part of a packed tensor, in the shape of another one."""
    if not like.numel():
        return like
    kind = _kind_of(like)
    part, rest[kind] = rest[kind].tensor_split([like.numel()])
    return part.view(like.shape)


class RowsSum:
    """Sums the tables of one step, each into its `result`. Implements `Operation`.

    Among N members that each host one block of virtual ranks, a member exchanges with about log2 N
    members. It sends each of them, on the way up and on the way down, one message of numbers and
    one for each type of number in the rows: 6 log2 N messages for tables of one type. On the way up
    it sends at each level at most half of the rows that a member has used, and on the way down S (1
    - 1/N) bytes, if the sum has S bytes.

    `own`: this member's partial sums, by table.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        layout: Layout,
        own: Sequence[Mapping[tree.Node, Rows]],
        plan: SumPlan,
        *,
        is_repeated: bool = False,
    ) -> None:
        self.tables = tables
        self.plan = plan
        # The sums by table, and this member's parts of the sums at tree nodes in the plan's order.
        self.results: list[Rows] = []
        self.made: list[list[RowPiece]] = []
        self._layout = layout
        self._own = own
        self._is_repeated = is_repeated
        # Sums of nodes, as far as they are here. The root's sum is the result.
        self._held: dict[tree.Node, NodeRows] = {}
        self._root = tree.root(layout.vranks) if self.plan.own is None else self.plan.own[0]
        # Leaves of other members: the virtual rank, the part of its rows, and the rows by table.
        self._leaves: list[tuple[int, Part, list[RowPiece]]] = []
        self._turn = 0
        self._exchange: RowExchange | None = None  # under way

    @classmethod
    def of(cls, tables: Sequence[RowTable], layout: Layout, *, counts: bool) -> RowsSum:
        """Return the sum of this step. `counts`: this worker's results count."""
        nodes = layout.nodes[layout.rank]
        own = [{n: t.partials[n] if counts else t.make_rows() for n in nodes} for t in tables]
        return cls(tables, layout, own, layout.plan)

    def repeat(self, plan: SumPlan) -> RowsSum:
        """Return the same sum by another plan, whose results stay apart from the tables."""
        return RowsSum(self.tables, self._layout, self._own, plan, is_repeated=True)

    def begin(self, transport: Transport) -> None:
        """Exchange the first numbers of rows."""
        if self.plan.up or self.plan.down:
            for node in self._layout.nodes[self._layout.rank]:
                self._held[node] = NodeRows()
                self._held[node].put(WHOLE, [RowPiece.of(found[node]) for found in self._own])
        self._begin_turn(transport)

    def is_ready(self) -> bool:
        return self._exchange is None or self._exchange.is_ready()

    def advance(self, transport: Transport) -> bool:
        """Complete the exchange of this turn, add rows up, and begin the next exchange."""
        if self._exchange is None:
            return False
        if self._exchange.advance(transport):
            return True
        self._take_in(self._exchange.arrived)
        self._turn += 1
        return self._begin_turn(transport)

    def finish(self) -> None:
        """Hand the sums to the tables."""
        if self.plan.up or self.plan.down:
            self.results = self._total.gather()
        else:
            self.results = [found[self._root] for found in self._own]
        self._held = {}
        if not self._is_repeated:
            self.use(self.results)

    def use(self, results: list[Rows]) -> None:
        """Use these as the sums of the tables."""
        self.results = results
        for table, result in zip(self.tables, results, strict=True):
            table.result = result

    @property
    def sums(self) -> list[torch.Tensor]:
        """Return the tensors with this operation's sums."""
        return [table.result.values for table in self.tables]

    def doubt(self) -> int:
        """Judge the sums: Doubt.FINITE, or whether this member's part of them is not."""
        found: int = Doubt.FINITE
        for table, own in zip(self.tables, self._own, strict=True):
            if not _is_finite(table.result.values):
                is_mine = any(not _is_finite(rows.values) for rows in own.values())
                found = max(
                    found, Doubt.BLAMED + self._layout.rank if is_mine else Doubt.UNATTRIBUTED
                )
        return found

    def agrees(self, vrank: int, leaves: Mapping[int, Flat | Rows]) -> bool:
        """Return whether a rank's rows, as far as they are here, equal its leaves bit for bit."""
        for whose, part, pieces in self._leaves:
            if whose != vrank:
                continue
            for table, piece in zip(self.tables, pieces, strict=True):
                leaf = leaves[table.index]
                assert isinstance(leaf, Rows)
                if not RowPiece.of(leaf).cut(part).rows.equals(piece.rows):
                    return False
        return True

    @property
    def _total(self) -> NodeRows:
        return self._held.setdefault(self._root, NodeRows())

    def _begin_turn(self, transport: Transport) -> bool:
        """Begin the exchange of this turn; return False if there is none."""
        self._exchange = None
        up, levels = len(self.plan.up), (*self.plan.up, *self.plan.down)
        if self._turn == len(levels):
            return False
        leaving: dict[int, list[RowPiece]] = {}
        for each in levels[self._turn].sends:
            held = self._held[each.node] if self._turn < up else self._total
            leaving.setdefault(each.peer, []).extend(held.take(each.part))
        self._exchange = RowExchange(self.tables, leaving, levels[self._turn].receives)
        self._exchange.begin(transport)
        return True

    def _take_in(self, arrived: Sequence[tuple[Planned, list[RowPiece]]]) -> None:
        """Take in the rows that have come, and compute the sums of this level."""
        if self._turn >= len(self.plan.up):
            for message, pieces in arrived:
                self._total.put(message.part, pieces)
            return
        for message, pieces in arrived:
            for piece in pieces:
                current.probe.handle_received(piece.rows.values)
            self._held.setdefault(message.node, NodeRows()).put(message.part, pieces)
            start, width = message.node
            if min(width, self._layout.vranks - start) == 1:
                self._leaves.append((start, message.part, pieces))
        for each in self.plan.up[self._turn].additions:
            left = self._held.pop(each.left).take(each.part)
            right = self._held.pop(each.right).take(each.part)
            added = [one.add(other) for one, other in zip(left, right, strict=True)]
            self._held[each.node] = NodeRows()
            self._held[each.node].put(each.part, added)
            self.made.append(added)


def _is_finite(values: torch.Tensor) -> bool:
    return cmath.isfinite(add_up(values).item()) or bool(torch.isfinite(values).all())
