"""Brings joiners up to date, and proves that every member holds the same state.

The state travels striped over all donors: donor d sends the d-th share of the bytes, each part with
a digest that the joiner checks before anything is loaded. After loading, every member shows the
fingerprint of its whole state; only when all agree does the view count as synced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from holdfast.core.errors import Aborted, StateMismatch
from holdfast.core.partition import part_of
from holdfast.train.checkpoint import state
from holdfast.train.checkpoint.loaded_state import LoadedState
from holdfast.train.checkpoint.state_comparison import fingerprint
from holdfast.train.exchange.layout import TAG_STATE, Layout, all_gather
from holdfast.train.exchange.seam import Transport
from holdfast.train.exchange.tensor_bytes import as_bytes

PART_BYTES = 32 << 20
DIGEST_WORDS = 2


@dataclass(frozen=True, slots=True)
class StatePart:
    """Describes a range of one tensor's bytes, sent by one donor."""

    donor: int
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
            self._receive(donors)
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
            for joiner in joiners:
                self._transport.exchange([(joiner, size), (joiner, body)], [], TAG_STATE).wait()
        for part in parts_of([t.numel() * t.element_size() for t in tensors], donors):
            if part.donor == rank:
                data = as_bytes(tensors[part.tensor])[part.start : part.stop]
                digest = digest_of(data)
                sends = [m for j in joiners for m in ((j, data), (j, digest))]
                self._transport.exchange(sends, [], TAG_STATE).wait()

    def _receive(self, donors: list[int]) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        self._transport.exchange([], [(donors[0], size)], TAG_STATE).wait()
        body = torch.empty(int(size[0]), dtype=torch.uint8)
        self._transport.exchange([], [(donors[0], body)], TAG_STATE).wait()
        skeleton = body.numpy().tobytes()
        tensors = [state.allocate(meta) for meta in state.metas(skeleton)]
        under_way = []
        for part in parts_of([t.numel() * t.element_size() for t in tensors], donors):
            data = as_bytes(tensors[part.tensor])[part.start : part.stop]
            digest = torch.zeros(DIGEST_WORDS, dtype=torch.int64)
            receives = [(part.donor, data), (part.donor, digest)]
            pending = self._transport.exchange([], receives, TAG_STATE)
            under_way.append((part, data, digest, pending))
        for part, data, digest, pending in under_way:
            pending.wait()
            if not torch.equal(digest_of(data), digest):
                raise Aborted(f"the state part {part} arrived damaged")
        self._loading()
        self._loaded.load(skeleton, tensors)


def parts_of(sizes: Sequence[int], donors: Sequence[int]) -> list[StatePart]:
    """Cut all tensors' bytes into one contiguous share per donor, in parts of bounded size."""
    parts: list[StatePart] = []
    for number, donor in enumerate(donors):
        begin, end = part_of(sum(sizes), number, len(donors))
        at = 0
        for index, size in enumerate(sizes):
            first, last = max(begin - at, 0), min(end - at, size)
            starts = range(first, last, PART_BYTES)
            parts += [StatePart(donor, index, s, min(s + PART_BYTES, last)) for s in starts]
            at += size
    return parts


def digest_of(data: torch.Tensor) -> torch.Tensor:
    words = xxhash.xxh3_128(data.numpy().data).digest()
    return torch.frombuffer(bytearray(words), dtype=torch.int64).clone()
