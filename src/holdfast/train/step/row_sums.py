"""Sums sparse gradients exactly: all members receive all partial sums, and each adds them up.

Tasks share few rows of a large table, so to sum by parts and to gather the parts would move nearly
as much. The numbers of rows are sent first, then the rows.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence

import torch

from holdfast.core import tree
from holdfast.core.step.events import FINITE, NOBODYS, SOMEBODYS
from holdfast.train.exchange.layout import TAG_ROWS, Layout
from holdfast.train.exchange.seam import Message, Pending, Transport, is_done
from holdfast.train.step.bucket_sums import add_up
from holdfast.train.step.buckets import Flat
from holdfast.train.step.probe import current
from holdfast.train.step.row_table import Rows, RowTable

Kind = tuple[torch.dtype, torch.device]
_WORDS = 2  # for each partial sum: number of rows, and whether it is dense


class RowsSum:
    """Sums the tables of one step, each into its `result`. `counts`: this worker's results count.

    Implements `Operation`.
    """

    def __init__(self, tables: Sequence[RowTable], layout: Layout, *, counts: bool) -> None:
        self.tables = tables
        self._layout = layout
        # by table; those of all members once they have arrived
        self._parts: list[dict[tree.Node, Rows]] = [
            {n: t.partials[n] if counts else t.make_rows() for n in layout.nodes[layout.rank]}
            for t in tables
        ]
        self._sizes: dict[int, torch.Tensor] = {}  # by rank: [tables, nodes, words]
        self._pending: Pending | None = None
        self._has_sent = False

    def begin(self, transport: Transport) -> None:
        """Exchange the numbers of rows."""
        layout = self._layout
        for rank, nodes in enumerate(layout.nodes):
            self._sizes[rank] = torch.zeros(len(self.tables), len(nodes), _WORDS, dtype=torch.int64)
        for found, sizes in zip(self._parts, self._sizes[layout.rank], strict=True):
            for size, rows in zip(sizes, found.values(), strict=True):
                size.copy_(torch.tensor([len(rows.places), int(rows.dense)]))
        own = self._sizes[layout.rank]
        sends = [(p, own) for p in layout.others if own.numel()]
        receives = [(p, self._sizes[p]) for p in layout.others if self._sizes[p].numel()]
        self._pending = transport.exchange(sends, receives, TAG_ROWS)

    def is_ready(self) -> bool:
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Exchange the rows, once their numbers are known."""
        self._wait()
        if self._has_sent:
            return False
        self._has_sent = True
        layout = self._layout
        own = _pack(_tensors_of(rows for parts in self._parts for rows in parts.values()))
        sends: list[Message] = [(peer, flat) for peer in layout.others for flat in own]
        receives: list[Message] = []
        for peer in layout.others:
            flats, found = self._make_room(peer)
            receives += [(peer, flat) for flat in flats]
            for (i, node), rows in found.items():
                self._parts[i][node] = rows
        for peer in layout.others:
            current.probe.handle_sending(peer, sum(t.nbytes for p, t in sends if p == peer))
        self._pending = transport.exchange(sends, receives, TAG_ROWS)
        return True

    def _make_room(self, peer: int) -> tuple[list[torch.Tensor], dict[tuple[int, tree.Node], Rows]]:
        """Return arrays for what a member sends, and the rows there, by table and node."""
        expected = {}
        for i, (table, sizes) in enumerate(zip(self.tables, self._sizes[peer], strict=True)):
            for node, (count, dense) in zip(self._layout.nodes[peer], sizes.tolist(), strict=True):
                expected[i, node] = table.make_rows(count, dense=bool(dense))
        flats = _pack(_tensors_of(expected.values()))
        rest = {_kind_of(flat): flat for flat in flats}
        found = {}
        for key, rows in expected.items():
            places, values = (_take(rest, like) for like in (rows.places, rows.values))
            found[key] = Rows(places=places, values=values, dense=rows.dense)
        return flats, found

    def finish(self) -> None:
        """Add the rows of all members."""
        others = [n for p in self._layout.others for n in self._layout.nodes[p]]
        for table, parts in zip(self.tables, self._parts, strict=True):
            for node in others:
                current.probe.handle_received(parts[node].values)
            table.result = tree.fold(parts, self._layout.vranks, Rows.add)

    @property
    def sums(self) -> list[torch.Tensor]:
        """Return the tensors with this operation's sums."""
        return [table.result.values for table in self.tables]

    def doubt(self) -> int:
        """Judge the sums: FINITE, or whose part of them is not."""
        owner = {node: rank for rank, nodes in enumerate(self._layout.nodes) for node in nodes}
        found = FINITE
        for table, parts in zip(self.tables, self._parts, strict=True):
            if not _is_finite(table.result.values):
                wrong = [owner[n] for n, rows in parts.items() if not _is_finite(rows.values)]
                found = max(found, NOBODYS if not wrong else SOMEBODYS + min(wrong))
        return found

    def agrees(self, vrank: int, leaves: Mapping[int, Flat | Rows]) -> bool:
        """Return whether a virtual rank's rows equal those of its leaves bit for bit."""
        for table, parts in zip(self.tables, self._parts, strict=True):
            leaf = leaves[table.index]
            assert isinstance(leaf, Rows)
            for (start, width), rows in parts.items():
                alone = start == vrank and min(width, self._layout.vranks - start) == 1
                if alone and not leaf.equals(rows):
                    return False
        return True

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()


def _tensors_of(every: Iterable[Rows]) -> list[torch.Tensor]:
    return [t for rows in every for t in (rows.places, rows.values) if t.numel()]


def _pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one flat tensor for each type of number: few messages in place of many."""
    kinds = dict.fromkeys(map(_kind_of, tensors))
    return [torch.cat([t.reshape(-1) for t in tensors if _kind_of(t) == kind]) for kind in kinds]


def _kind_of(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.device


def _take(rest: dict[Kind, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Take the next part of a packed tensor, in the shape of another one."""
    if not like.numel():
        return like
    kind = _kind_of(like)
    part, rest[kind] = rest[kind].tensor_split([like.numel()])
    return part.view(like.shape)


def _is_finite(values: torch.Tensor) -> bool:
    return cmath.isfinite(add_up(values).item()) or bool(torch.isfinite(values).all())
