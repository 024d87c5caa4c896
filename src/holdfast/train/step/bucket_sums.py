"""Sums one bucket exactly, among the members of one view.

Most buckets are summed along the canonical tree (core/sum_plan.py): each member exchanges with few
others. A bucket whose sum is checked is summed flat: each member owns one piece, receives the
partial sums of all members for it, and folds them, so that one member answers for each piece.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping

import torch

from holdfast.core import tree
from holdfast.core.step.events import FINITE, NOBODYS, SOMEBODYS
from holdfast.train.exchange.cut_plan import CutAddition, Side
from holdfast.train.exchange.layout import TAG_BUCKETS, TAG_OF_PLAN, Layout
from holdfast.train.exchange.seam import Message, Pending, Transport, is_done
from holdfast.train.exchange.tensor_bytes import as_bytes
from holdfast.train.exchange.waits import Waits
from holdfast.train.step.buckets import Bucket, Flat
from holdfast.train.step.probe import current
from holdfast.train.step.row_table import Rows


class BucketSum:
    """Sums one bucket over all virtual ranks along the tree, into its `result`."""

    def __init__(self, bucket: Bucket, layout: Layout, waits: Waits | None = None) -> None:
        self.bucket = bucket
        self._waits = waits
        self._tag = make_tag(bucket)
        self._result = bucket.result.data
        self._layout = layout
        self._plan = layout.cut_plan(self._result.numel())
        self._own = {n: bucket.partials[n].data for n in layout.nodes[layout.rank]}
        # Partial sums that are here, each with its first element in the bucket.
        self._held = {node: (0, data) for node, data in self._own.items()}
        # Leaves of other members, each with its first element in the bucket.
        self._leaves: list[tuple[int, int, torch.Tensor]] = []
        self._beside = self._result[:0]
        self._turn = 0  # the number of the exchange under way
        self._pending: Pending | None = None
        self._total: torch.Tensor | None = None

    def begin(self, transport: Transport) -> None:
        """Begin the first exchange."""
        self._beside = self.bucket.scratch(self._plan.beside)
        if self._plan.whole is not None:
            self._result.copy_(self._own[self._plan.whole])
        self._exchange(transport)

    def is_ready(self) -> bool:
        """Return whether the present exchange is complete."""
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Wait for the present exchange, and begin the next one. Return False after the last."""
        if self._pending is not None:
            self._pending.wait(self._waits)
        self._pending = None
        if self._turn < len(self._plan.up):
            for each in self._plan.up[self._turn].additions:
                self._add(each)
        self._turn += 1
        return self._exchange(transport)

    def finish(self) -> None:
        """Record the sum of all elements."""
        self._total = add_up(self._result)

    @property
    def sums(self) -> list[torch.Tensor]:
        """Return the tensors with this operation's sums."""
        return [self._result]

    def doubt(self) -> int:
        """Judge the sum: FINITE, or whether this member's part of it is not."""
        if self._total is None or cmath.isfinite(self._total.item()):
            return FINITE
        is_mine = any(not bool(torch.isfinite(part).all()) for part in self._own.values())
        return SOMEBODYS + self._layout.rank if is_mine else NOBODYS

    def agrees(self, vrank: int, leaves: Mapping[int, Flat | Rows]) -> bool:
        """Return whether a rank's part, as far as it is here, equals its leaf bit for bit."""
        leaf = leaves[self.bucket.index]
        assert isinstance(leaf, Flat)
        return all(
            torch.equal(as_bytes(part), as_bytes(leaf.data[start : start + part.numel()]))
            for whose, start, part in self._leaves
            if whose == vrank
        )

    def _exchange(self, transport: Transport) -> bool:
        """Begin the exchange of this turn; return False if there is none."""
        plan, turn = self._plan, self._turn
        sent_us = 0 if self._waits is None else self._waits.now_us()
        sends: list[Message] = []
        receives: list[Message] = []
        if turn < len(plan.up):
            level = plan.up[turn]
            for each in level.sends:
                start, data = self._held[each.node]
                part = data[each.where.start - start : each.where.stop - start]
                sends.append((each.peer, part))
            for addition in level.additions:
                for side in (addition.left, addition.right):
                    receives += self._rooms(addition, side)
            tag = self._tag
        elif turn < len(plan.up) + len(plan.down):
            exchange = plan.down[turn - len(plan.up)]
            sends = [(each.peer, self._result[each.where]) for each in exchange.sends]
            receives = [(each.peer, self._result[each.where]) for each in exchange.receives]
            tag = self._tag + 1
        else:
            return False
        for peer, part in sends:
            current.probe.handle_sending(peer, part.nbytes)
        self._pending = transport.exchange(sends, receives, tag, sent_us)
        return True

    def _rooms(self, addition: CutAddition, side: Side) -> list[Message]:
        """Return where the other members' elements of a side go."""
        if side.room is None:
            return []
        room, first = self._beside[side.room], addition.where.start
        return [(m.peer, room[m.where.start - first : m.where.stop - first]) for m in side.come]

    def _add(self, addition: CutAddition) -> None:
        left, right = (
            self._operand(addition, addition.left),
            self._operand(addition, addition.right),
        )
        where = addition.where
        out = self._result[where] if addition.out is None else self._beside[addition.out]
        torch.add(left, right, out=out)
        self._held[addition.node] = (where.start, out)

    def _operand(self, addition: CutAddition, side: Side) -> torch.Tensor:
        """Return one side of an addition, now that all its elements are here."""
        where = addition.where
        if side.room is None:
            start, data = self._held[side.node]
            return data[where.start - start : where.stop - start]
        room = self._beside[side.room]
        (leaf, width), vranks = side.node, self._layout.vranks
        for m, (_, part) in zip(side.come, self._rooms(addition, side), strict=True):
            current.probe.handle_received(part)
            if min(width, vranks - leaf) == 1:
                self._leaves.append((leaf, m.where.start, part))
        if side.own is not None:
            start, data = self._held[side.node]
            begin, end = side.own.start, side.own.stop
            room[begin - where.start : end - where.start] = data[begin - start : end - start]
        return room


class FlatSum:
    """Sums one bucket over all virtual ranks, each piece by one member, into its `result`.

    With `into`, another buffer, and `turned`, the same sum is computed again by other members.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: Layout,
        waits: Waits | None = None,
        into: torch.Tensor | None = None,
        turned: int = 0,
    ) -> None:
        self.bucket = bucket
        self._waits = waits
        self._tag = make_tag(bucket)
        self._total: torch.Tensor | None = None  # sum of all elements of this member's piece
        self._result = bucket.result.data if into is None else into
        self._layout = layout
        numel = self._result.numel()
        self._pieces = [layout.piece(rank, numel, turned) for rank in range(layout.size)]
        self._own = {n: bucket.partials[n].data for n in layout.nodes[layout.rank]}
        self._received: dict[tree.Node, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []  # rooms for intermediate sums
        self._pending: Pending | None = None
        self._is_folded = False

    def begin(self, transport: Transport) -> None:
        """Send the partial sums of each piece to its owner."""
        layout, bucket = self._layout, self.bucket
        sent_us = 0 if self._waits is None else self._waits.now_us()
        own = self._pieces[layout.rank]
        width = own.stop - own.start
        sends: list[Message] = []
        receives: list[Message] = []
        incoming = [(p, node) for p in layout.others for node in layout.nodes[p]]
        count = len(incoming) + tree.held_at_once(len(incoming) + len(self._own), layout.vranks)
        scratch = bucket.scratch(width * count)
        rows = [scratch[i * width : (i + 1) * width] for i in range(count)]
        for i, (peer, node) in enumerate(incoming):
            self._received[node] = rows[i]
            receives.append((peer, rows[i]))
        self._free = rows[len(incoming) + 1 :]  # one of the sums goes straight to the result
        for peer in layout.others:
            parts = [data[self._pieces[peer]] for data in self._own.values()]
            sends += [(peer, part) for part in parts]
            current.probe.handle_sending(peer, sum(part.nbytes for part in parts))
        messages = drop_empty(sends), drop_empty(receives)
        self._pending = transport.exchange(*messages, self._tag, sent_us)

    def is_ready(self) -> bool:
        """Return whether the present exchange is complete."""
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Wait for the partial sums, and send this member's sum to all; then wait for theirs."""
        if self._pending is not None:
            self._pending.wait(None if self._is_folded else self._waits)
        self._pending = None
        if self._is_folded:
            return False
        for part in self._received.values():
            current.probe.handle_received(part)
        result, piece, peers = self._result, self._pieces[self._layout.rank], self._layout.others
        out = result[piece]
        self._fold(out, piece)
        self._is_folded = True
        sends = [(p, out) for p in peers]
        receives = [(p, result[self._pieces[p]]) for p in peers]
        self._pending = transport.exchange(drop_empty(sends), drop_empty(receives), self._tag + 1)
        self._total = add_up(out)  # computed while the piece is sent
        return True

    def finish(self) -> None:
        return

    @property
    def sums(self) -> list[torch.Tensor]:
        """Return the tensors with this operation's sums."""
        return [self._result]

    def doubt(self) -> int:
        """Judge the piece that was summed here: FINITE, or whose part of it is not."""
        if self._total is None or cmath.isfinite(self._total.item()):
            return FINITE
        owner = {node: rank for rank, nodes in enumerate(self._layout.nodes) for node in nodes}
        piece = self._pieces[self._layout.rank]
        parts = {**self._received, **{node: data[piece] for node, data in self._own.items()}}
        wrong = [owner[n] for n, part in parts.items() if not bool(torch.isfinite(part).all())]
        return NOBODYS if not wrong else SOMEBODYS + min(wrong)

    def agrees(self, vrank: int, leaves: Mapping[int, Flat | Rows]) -> bool:
        """Return whether a rank's part, as far as it is here, equals its leaf bit for bit."""
        piece, leaf = self._pieces[self._layout.rank], leaves[self.bucket.index]
        assert isinstance(leaf, Flat)
        for (start, width), part in self._received.items():
            if start == vrank and min(width, self._layout.vranks - start) == 1:
                return torch.equal(as_bytes(part), as_bytes(leaf.data[piece]))
        return True

    def _fold(self, out: torch.Tensor, piece: slice) -> None:
        """Sum into `out`, and leave all parts unchanged: they may be examined afterwards."""
        parts = {n: data[piece] for n, data in self._own.items()} | self._received
        kept = {id(part) for part in parts.values()}
        free = [out, *self._free]  # the first one taken ends up with the whole sum

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            ours = [each for each in (left, right) if id(each) not in kept]
            free.extend(ours[1:])
            return torch.add(left, right, out=ours[0] if ours else free.pop(0))

        total = tree.fold(parts, self._layout.vranks, add)
        if total is not out:  # there was nothing to add
            out.copy_(total)


def add_up(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all elements, which is not finite if one of them is not."""
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return values.sum(dtype=wide)


def make_tag(bucket: Bucket) -> int:
    """Return the tag of a bucket's partial sums; the next tag is for finished sums."""
    return TAG_BUCKETS + 2 * bucket.index + TAG_OF_PLAN * bucket.plan


def drop_empty(messages: Iterable[Message]) -> list[Message]:
    """Return the messages that have an element."""
    return [m for m in messages if m[1].numel() > 0]
