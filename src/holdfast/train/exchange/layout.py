"""Lays out a view for exchanges: each member's nodes of the tree, messages' tags, and gathers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.core import tree
from holdfast.core.partition import part_of
from holdfast.core.types import Peer, View, WorkerId
from holdfast.train.exchange.seam import Transport

TAG_VOTE, TAG_TABLE, TAG_BUFFERS, TAG_AUDIT, TAG_VALUES, TAG_ROWS, TAG_PLAN = 1, 2, 3, 4, 5, 6, 7
TAG_UPDATE = 8
TAG_STATE = 16
TAG_BUCKETS = 1024
TAG_OF_PLAN = 1 << 16  # times the plan's number, so that two plans never share a tag
PIECE_ALIGN = 64  # elements; pieces start on cache lines


@dataclass(frozen=True, slots=True)
class Layout:
    """Maps the nodes of the tree to the members of one view, seen from one member."""

    rank: int
    size: int
    vranks: int
    hosted: tuple[tuple[int, ...], ...]  # by rank
    nodes: tuple[tuple[tree.Node, ...], ...]  # by rank
    owners: tuple[WorkerId, ...]  # by virtual rank
    shard: int = 0  # the processes of one shard exchange gradients with each other

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
        """Return by rank the peers with which this process exchanges gradients, itself included."""
        return tuple(Peer(worker, self.shard) for worker in view.workers)

    @property
    def others(self) -> Sequence[int]:
        """Return every other rank, starting after one's own, so that not all send to 0 first."""
        return _other_ranks(self.rank, self.size)

    def piece(self, rank: int, numel: int, turned: int = 0) -> slice:
        """Return which elements of a flat buffer `rank` sums; `turned`: those of a later rank."""
        return piece_of((rank + turned) % self.size, self.size, numel)


@functools.lru_cache(maxsize=8)  # asked for several times in every exchange
def _other_ranks(rank: int, size: int) -> Sequence[int]:
    return tuple((rank + i) % size for i in range(1, size))


def piece_of(rank: int, size: int, numel: int) -> slice:
    """Return the elements of a flat buffer that fall to one of `size` members."""
    return slice(*part_of(numel, rank, size, PIECE_ALIGN))


def all_gather(transport: Transport, layout: Layout, mine: torch.Tensor, tag: int) -> torch.Tensor:
    """Return every member's small record, by rank: [size, *mine.shape]. Blocks; raises Aborted."""
    table = torch.empty((layout.size, *mine.shape), dtype=mine.dtype)
    table[layout.rank] = mine
    transport.exchange(
        [(p, mine) for p in layout.others], [(p, table[p]) for p in layout.others], tag
    ).wait()
    return table


def gather_bytes(transport: Transport, layout: Layout, mine: bytes) -> list[bytes]:
    """Return every member's message, by rank. Blocks; raises Aborted."""
    length = torch.tensor([len(mine)], dtype=torch.int64)
    lengths = all_gather(transport, layout, length, TAG_AUDIT)[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    table = all_gather(transport, layout, padded, TAG_AUDIT)
    return [row[:size].numpy().tobytes() for row, size in zip(table, lengths, strict=True)]
