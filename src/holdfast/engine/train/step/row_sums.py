"""Sums sparse gradients exactly, along the canonical tree (core/sum_plan.py), as buckets are.

Each member exchanges with few others. Every exchange of rows follows an exchange of their numbers.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence

import torch

from holdfast.engine.core import tree
from holdfast.engine.core.ground.events import FINITE, NOBODYS, SOMEBODYS
from holdfast.engine.core.sum_plan import WHOLE, Message, Part, SumPlan
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.step.bucket_sums import add_up
from holdfast.engine.train.step.buckets import Flat
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.row_exchange import RowExchange
from holdfast.engine.train.step.row_pieces import NodeRows, RowPiece
from holdfast.engine.train.step.row_table import Rows, RowTable


class RowsSum:
    """Sums the tables of one step, each into its `result`. Implements `Operation`.

    Among N members that each host one block of virtual ranks, a member exchanges with about log2 N
    others. It sends each of them, on the way up and on the way down, one message of numbers and one
    for each type of number in the rows: 6 log2 N messages for tables of one type. On the way up it
    sends at each level at most half of the rows that a member has used, and on the way down
    S (1 - 1/N) bytes, if the sum has S bytes.

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
        """Judge the sums: FINITE, or whether this member's part of them is not."""
        found = FINITE
        for table, own in zip(self.tables, self._own, strict=True):
            if not _is_finite(table.result.values):
                is_mine = any(not _is_finite(rows.values) for rows in own.values())
                found = max(found, SOMEBODYS + self._layout.rank if is_mine else NOBODYS)
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

    def _take_in(self, arrived: Sequence[tuple[Message, list[RowPiece]]]) -> None:
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
