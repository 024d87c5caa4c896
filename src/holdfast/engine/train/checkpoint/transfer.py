"""Brings joiners up to date, and proves that every member holds the same state.

Each joiner receives one share of the state, striped over a few donors, and the joiners spread their
shares among each other. So a donor sends no more than the state's size, however many joiners there
are. Each part has a digest that the joiner checks before anything is loaded. After loading, every
member shows the fingerprint of its whole state; only when all agree does the view count as synced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.errors import Aborted, StateMismatch
from holdfast.engine.core.sum_plan import part_of
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.loaded_state import LoadedState, fingerprint
from holdfast.engine.train.exchange.layout import (
    TAG_STATE,
    Layout,
    all_gather,
    find_branches,
    spread_shares,
)
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tensor_bytes import DIGEST_WORDS, as_bytes, digest_of

PART_BYTES = 32 << 20
DONORS_MAX = 16  # for each joiner


@dataclass(frozen=True, slots=True)
class StatePart:
    """Describes a range of one tensor's bytes, within the share of the number `share`."""

    share: int
    tensor: int
    start: int
    stop: int


class StateSync:
    """Synchronises one view. `loading` is called just before any object is overwritten."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        loaded: LoadedState,
        loading: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._loaded = loaded
        self._loading = loading

    def run(
        self, donors: list[int], joiners: list[int], back: Sequence[int] = ()
    ) -> dict[int, int]:
        """Send the state from donors to joiners, both given as ranks.

        Without donors the first member's state is the job's. `back`: ranks that have caught up
        without donors. If the members that have the state disagree, no state is sent, and their
        fingerprints are returned.
        """
        skeleton, tensors = self._loaded.capture()
        mine = fingerprint(skeleton, tensors)
        prints = self._gather(mine)
        held = {rank: prints[rank] for rank in (*donors, *back)}
        if len(set(held.values())) > 1:
            return held
        if not donors:
            donors = [r for r, p in enumerate(prints) if p == prints[0]]
            joiners = [r for r, p in enumerate(prints) if p != prints[0]]
        if self._layout.rank in donors and joiners:
            self._donate(donors, joiners, skeleton, tensors)
        elif self._layout.rank in joiners:
            self._receive(donors, joiners)
            mine = fingerprint(*self._loaded.capture())
        prints = self._gather(mine) if joiners else prints
        wrong = [r for r, p in enumerate(prints) if p != prints[donors[0]]]
        if self._layout.rank in wrong:
            self._loaded.check()
            raise StateMismatch("the protected objects do not hold the state that was loaded")
        if wrong:
            raise Aborted(f"members {wrong} could not take the state")
        return {}

    def _gather(self, mine: int) -> list[int]:
        word = torch.tensor([mine], dtype=torch.int64)
        return all_gather(self._transport, self._layout, word, TAG_STATE)[:, 0].tolist()

    def _donate(
        self, donors: list[int], joiners: list[int], skeleton: bytes, tensors: list[torch.Tensor]
    ) -> None:
        rank = self._layout.rank
        if rank == donors[0]:
            size = torch.tensor([len(skeleton)], dtype=torch.int64)
            body = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
            for message in (size, body):
                self._hand_on([rank, *joiners], message)
        stripes = pair_stripes(donors, joiners)
        for part in parts_of([t.nbytes for t in tensors], len(stripes)):
            donor, joiner = stripes[part.share]
            if donor == rank:
                data = as_bytes(tensors[part.tensor])[part.start : part.stop]
                sends = [(joiner, data), (joiner, digest_of(data))]
                self._transport.exchange(sends, [], TAG_STATE).wait()

    def _receive(self, donors: list[int], joiners: list[int]) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        self._hand_on([donors[0], *joiners], size)
        body = torch.empty(int(size[0]), dtype=torch.uint8)
        self._hand_on([donors[0], *joiners], body)
        skeleton = body.numpy().tobytes()
        tensors = [state.allocate(meta) for meta in state.metas(skeleton)]
        stripes = pair_stripes(donors, joiners)
        arriving = [
            Arriving.into(tensors, part, *stripes[part.share])
            for part in parts_of([t.nbytes for t in tensors], len(stripes))
        ]
        me = self._layout.rank
        mine = [each for each in arriving if each.joiner == me]
        under_way = [
            self._transport.exchange([], [(each.donor, t) for t in each.tensors], TAG_STATE)
            for each in mine
        ]
        for each, pending in zip(mine, under_way, strict=True):
            pending.wait()
            each.check()
        shares = [[t for a in arriving if a.joiner == j for t in a.tensors] for j in joiners]
        spread_shares(self._transport, joiners, me, shares, TAG_STATE)
        for each in arriving:
            if each.joiner != me:
                each.check()
        self._loading()
        self._loaded.load(skeleton, tensors)

    def _hand_on(self, ranks: list[int], message: torch.Tensor) -> None:
        """Spread a message of the first of these ranks to all of them."""
        giver, takers = find_branches(ranks.index(self._layout.rank), 0, len(ranks))
        if giver is not None:
            self._transport.exchange([], [(ranks[giver], message)], TAG_STATE).wait()
        if takers:
            self._transport.exchange([(ranks[t], message) for t in takers], [], TAG_STATE).wait()


@dataclass(frozen=True, slots=True)
class Arriving:
    """Is a part of the state that goes from one donor to one joiner, and on to all joiners."""

    part: StatePart
    donor: int
    joiner: int
    # The bytes, and their digest.
    tensors: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def into(
        cls, tensors: Sequence[torch.Tensor], part: StatePart, donor: int, joiner: int
    ) -> Arriving:
        """Describe a part that goes into one of these tensors."""
        data = as_bytes(tensors[part.tensor])[part.start : part.stop]
        digest = torch.zeros(DIGEST_WORDS, dtype=torch.int64)
        return cls(part, donor, joiner, (data, digest))

    def check(self) -> None:
        """Compare the bytes with their digest. Aborted."""
        data, digest = self.tensors
        if not torch.equal(digest_of(data), digest):
            raise Aborted(f"the state part {self.part} from rank {self.donor} arrived damaged")


def pair_stripes(donors: Sequence[int], joiners: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each stripe of the state the donor that sends it, and the joiner that gets it."""
    each = min(DONORS_MAX, -(-len(donors) // len(joiners)))
    return [(donors[i % len(donors)], joiners[i // each]) for i in range(each * len(joiners))]


def parts_of(sizes: Sequence[int], shares: int) -> list[StatePart]:
    """Cut all tensors' bytes into contiguous shares of one size, in parts of bounded size."""
    parts: list[StatePart] = []
    for share in range(shares):
        begin, end = part_of(sum(sizes), share, shares)
        at = 0
        for index, size in enumerate(sizes):
            first, last = max(begin - at, 0), min(end - at, size)
            starts = range(first, last, PART_BYTES)
            parts += [StatePart(share, index, s, min(s + PART_BYTES, last)) for s in starts]
            at += size
    return parts
