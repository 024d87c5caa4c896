"""Sums one bucket exactly, among the members of one view.

It is summed along the canonical tree (core/sum_plan.py), where each member exchanges with few
members.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping

import torch

from holdfast.engine.core.ground.events import Doubt
from holdfast.engine.core.sum_plan import SumPlan
from holdfast.engine.train.exchange.cut_plan import CutAddition, CutPlan, Side
from holdfast.engine.train.exchange.layout import TAG_BUCKETS, TAG_OF_PLAN, Layout
from holdfast.engine.train.exchange.seam import Message, Pending, Transport, Waits, is_done
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.step.buckets import Bucket, Flat
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.row_table import Rows


class BucketSum:
    """Sums one bucket over all virtual ranks along the tree, into its `result`.

    `plan`: make the same sum again, by this plan and in memory of its own.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: Layout,
        waits: Waits | None = None,
        plan: SumPlan | None = None,
    ) -> None:
        self.bucket = bucket
        self.plan = layout.plan if plan is None else plan
        self._waits = waits
        self._tag = make_tag(bucket)
        self._is_repeated = plan is not None
        self._layout = layout
        self._result = bucket.result.data
        if plan is None:
            self._cut = layout.cut_plan(self._result.numel())
        else:
            self._result = torch.empty_like(self._result)
            self._cut = CutPlan.of(plan, self._result.numel())
        self._own = {n: bucket.partials[n].data for n in layout.nodes[layout.rank]}
        # Partial sums that are here, each with its first element in the bucket.
        self._held = {node: (0, data) for node, data in self._own.items()}
        # Leaves of other members, each with its first element in the bucket.
        self._leaves: list[tuple[int, int, torch.Tensor]] = []
        self._beside = self._result[:0]
        self._turn = 0  # the number of the exchange under way
        self._pending: Pending | None = None
        self._total: torch.Tensor | None = None

    def repeat(self, plan: SumPlan) -> BucketSum:
        """Return the same sum by another plan, whose result stays apart from the bucket."""
        return BucketSum(self.bucket, self._layout, plan=plan)

    def begin(self, transport: Transport) -> None:
        """Begin the first exchange."""
        size = self._cut.beside
        if self._is_repeated:
            self._beside = self._result.new_empty(size)
        else:
            self._beside = self.bucket.scratch(size)
        if self._cut.whole is not None:
            self._result.copy_(self._own[self._cut.whole])
        self._exchange(transport)

    def is_ready(self) -> bool:
        """Return whether the present exchange is complete."""
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Wait for the present exchange, and begin the next one. Return False after the last."""
        if self._pending is not None:
            self._pending.wait(self._waits)
        self._pending = None
        if self._turn < len(self._cut.up):
            for each in self._cut.up[self._turn].additions:
                self._add(each)
        self._turn += 1
        return self._exchange(transport)

    def finish(self) -> None:
        """Record the sum of all elements."""
        self._total = add_up(self._result)

    @property
    def result(self) -> torch.Tensor:
        """Return the whole sum."""
        return self._result

    @property
    def sums(self) -> list[torch.Tensor]:
        """Return the tensors with this operation's sums."""
        return [self._result]

    def made_sums(self) -> list[torch.Tensor]:
        """Return this member's pieces of the sums at tree nodes, in the order of its plan."""
        nodes = [each.node for level in self.plan.up for each in level.additions]
        return [self._held[node][1] if node in self._held else self._result[:0] for node in nodes]

    def doubt(self) -> int:
        """Judge the sum: Doubt.FINITE, or whether this member's part of it is not."""
        if self._total is None or cmath.isfinite(self._total.item()):
            return Doubt.FINITE
        is_mine = any(not bool(torch.isfinite(part).all()) for part in self._own.values())
        return Doubt.BLAMED + self._layout.rank if is_mine else Doubt.UNATTRIBUTED

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
        plan, turn = self._cut, self._turn
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
        """Return the places of the other members' elements of a side."""
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


def add_up(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all elements, which is not finite if one of them is not."""
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return values.sum(dtype=wide)


def make_tag(bucket: Bucket) -> int:
    """Return the tag of a bucket's partial sums; the next tag is for finished sums."""
    return TAG_BUCKETS + 2 * bucket.index + TAG_OF_PLAN * bucket.plan
