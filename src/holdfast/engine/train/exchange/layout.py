"""Lays out a view for exchanges: each member's nodes of the tree, messages' tags, and gathers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core import tree
from holdfast.engine.core.spread_turns import Turn, find_branches, plan_turns
from holdfast.engine.core.sum_plan import SumPlan, part_of, plan_flat_sum, plan_sum
from holdfast.engine.core.types import Peer, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.train.exchange.cut_plan import PIECE_ALIGN, CutPlan
from holdfast.engine.train.exchange.seam import Message, Transport

TAG_VOTE, TAG_TABLE, TAG_BUFFERS, TAG_AUDIT, TAG_VALUES, TAG_ROWS, TAG_PLAN = 1, 2, 3, 4, 5, 6, 7
TAG_UPDATE, TAG_LATE = 8, 11
TAG_STATE = 16
TAG_BUCKETS = 1024
TAG_OF_PLAN = 1 << 16  # times the plan's number, so that two plans never share a tag


@dataclass(frozen=True)
class Layout:
    """Maps the nodes of the tree to the members of one view, seen from one member."""

    rank: int
    size: int
    vranks: int
    hosted: tuple[tuple[int, ...], ...]  # by rank
    nodes: tuple[tuple[tree.Node, ...], ...]  # by rank
    #: The hosts of the virtual ranks, in their order.
    owners: tuple[WorkerId, ...]
    #: The processes of one shard exchange gradients with each other.
    shard: int = 0

    @classmethod
    def of(cls, view: View, me: Peer, owners: Sequence[WorkerId] = ()) -> Layout:
        """Lay a view out; `owners`: the hosts of the virtual ranks, if they have changed since."""
        now = dataclasses.replace(view, owners=tuple(owners)) if owners else view
        hosted = tuple(now.list_hosted().values())
        vranks = len(view.owners)
        nodes = tuple(tree.maximal_nodes(h, vranks) for h in hosted)
        rank = view.rank(me.worker)
        return cls(rank, len(view.members), vranks, hosted, nodes, now.owners, me.shard)

    def with_owners(self, view: View, owners: tuple[WorkerId, ...]) -> Layout:
        """Return the layout of the same view with other hosts."""
        if owners == self.owners:
            return self
        return Layout.of(view, Peer(view.workers[self.rank], self.shard), owners)

    def addresses(self, view: View) -> tuple[Peer, ...]:
        """Return the peers that exchange gradients, by rank, with this process among them."""
        return tuple(Peer(worker, self.shard) for worker in view.workers)

    @property
    def others(self) -> Sequence[int]:
        """Return every other rank, starting after one's own, so that not all send to 0 first."""
        return _other_ranks(self.rank, self.size)

    @functools.cached_property
    def turns(self) -> tuple[Turn, ...]:
        """Return the turns in which something spreads from every member to every other."""
        return plan_turns(self.rank, self.size)

    @functools.cached_property
    def peers(self) -> frozenset[int]:
        """Return the ranks with which this one exchanges in each step."""
        first = next((rank for rank, hosted in enumerate(self.hosted) if 0 in hosted), 0)
        giver, takers = find_branches(self.rank, first, self.size)
        of_turns = [rank for turn in self.turns for rank in (turn.give_to, turn.get_from)]
        found = {*self.plan.peers, *of_turns, *takers}
        return frozenset(found if giver is None else found | {giver})

    @property
    def plan(self) -> SumPlan:
        """Return this member's plan for sums along the tree."""
        return self.turned_plan(0)

    def flat_plan(self, turned: int) -> SumPlan:
        """Return the plan of a flat sum: each member makes one piece, `turned` ranks later."""
        return plan_flat_sum(self.nodes, self.vranks, self.rank, turned)

    def turned_plan(self, turned: int) -> SumPlan:
        """Return the plan of a repeated sum, whose pieces are `turned` places later."""
        found = self._plans.get(turned)
        if found is None:
            found = plan_sum(self.nodes, self.vranks, self.rank, turned)
            self._plans[turned] = found
        return found

    def cut_plan(self, numel: int) -> CutPlan:
        """Return the plan for buffers of `numel` elements."""
        found = self._cut_plans.get(numel)
        if found is None:
            found = self._cut_plans[numel] = CutPlan.of(self.plan, numel)
        return found

    @functools.cached_property
    def _plans(self) -> dict[int, SumPlan]:
        return {}

    @functools.cached_property
    def _cut_plans(self) -> dict[int, CutPlan]:
        return {}

    def piece(self, rank: int, numel: int) -> slice:
        """Return which elements of a flat buffer fall to `rank`."""
        return piece_of(rank, self.size, numel)


@functools.lru_cache(maxsize=8)  # asked for several times in every exchange
def _other_ranks(rank: int, size: int) -> Sequence[int]:
    return tuple((rank + i) % size for i in range(1, size))


def piece_of(rank: int, size: int, numel: int) -> slice:
    """Return the elements of a flat buffer that fall to one of `size` members."""
    return slice(*part_of(numel, rank, size, PIECE_ALIGN))


def all_gather(transport: Transport, layout: Layout, mine: torch.Tensor, tag: int) -> torch.Tensor:
    """Return every member's small record, by rank: [size, *mine.shape]. Blocks; raises Aborted."""
    return gather_records(transport, layout.rank, layout.turns, mine, tag)


def gather_records(
    transport: Transport, rank: int, turns: Sequence[Turn], mine: torch.Tensor, tag: int
) -> torch.Tensor:
    """Return every member's small record, by rank: [size, *mine.shape]. Blocks; raises Aborted.

    In each of log2 N turns a member sends all records that it has to one other member, which
    doubles the number of records that it has.
    """
    size = turns[-1].distance + turns[-1].records if turns else 1
    rows = torch.empty((size, *mine.shape), dtype=mine.dtype)
    rows[0] = mine  # row i belongs to the i-th rank after this one
    for distance, count, give_to, get_from in turns:
        come = rows[distance : distance + count]
        transport.exchange([(give_to, rows[:count])], [(get_from, come)], tag).wait()
    return rows.roll(rank, 0)


def gather_bytes(transport: Transport, layout: Layout, mine: bytes) -> list[bytes]:
    """Return every member's message, by rank. Blocks; raises Aborted."""
    length = torch.tensor([len(mine)], dtype=torch.int64)
    lengths = all_gather(transport, layout, length, TAG_AUDIT)[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    table = all_gather(transport, layout, padded, TAG_AUDIT)
    return [row[:size].numpy().tobytes() for row, size in zip(table, lengths, strict=True)]


def spread_shares(
    transport: Transport,
    ranks: Sequence[int],
    me: int,
    shares: Sequence[Sequence[torch.Tensor]],
    tag: int,
) -> None:
    """Send the own share of something large to all of these ranks, and receive theirs. Aborted.

    In each of log2 N turns a member sends all shares that it has to one other member, so each share
    reaches each member once.

    `ranks`: the members that take part, in the same order on all. `me`: the own one. `shares`: for
    each of `ranks` the tensors of its share, of the same sizes on all members.
    """
    count, place = len(ranks), ranks.index(me)
    for turn in plan_turns(place, count):
        have = [shares[(place + i) % count] for i in range(turn.records)]
        come = [shares[(place + turn.distance + i) % count] for i in range(turn.records)]
        sends = _messages(ranks[turn.give_to], have)
        receives = _messages(ranks[turn.get_from], come)
        transport.exchange(sends, receives, tag).wait()


def _messages(peer: int, shares: Sequence[Sequence[torch.Tensor]]) -> list[Message]:
    return [(peer, tensor) for share in shares for tensor in share if tensor.numel()]
