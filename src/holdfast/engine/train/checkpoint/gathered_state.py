"""Captures the whole state where each member has only its share of the optimizers' states.

No member needs all of it: each names the bytes that it has to keep or to save, and receives the
others' share of them, with a digest. All members call it at the same boundary.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.engine.core.errors import Damaged
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.state import Extent, Meta, NamedTensor, Wanted
from holdfast.engine.train.checkpoint.transfer import DIGEST_WORDS, digest_of
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.exchange.seam import Message
from holdfast.engine.train.optimizer_sharding.sharded_optimizers import ShardedOptimizers, Tree

ALIGNED = 64  # bytes


class GatheredState:
    """Captures the state that `sharding` has shared out."""

    def __init__(self, sharding: ShardedOptimizers) -> None:
        self._sharding = sharding

    def capture(self, wanted: Wanted) -> tuple[bytes, list[NamedTensor]]:
        """Return the skeleton of the whole state, and tensors in which the wanted bytes are valid.

        Their other bytes are undefined. Damaged: a message did not arrive as it was sent.
        """
        layout = self._sharding.layout
        assert layout is not None, "the state is captured in a view only"
        whole, holders = self._merge(layout)
        skeleton, found = state.flatten_named(whole)
        holder = [holders.get(each.tensor.data_ptr()) for each in found]
        tensors = [each.tensor for each in found]
        wants = [wanted(skeleton, tensors, rank) for rank in range(layout.size)]
        mine = wants[layout.rank]
        for index, each in enumerate(found):
            here = holder[index] in (None, layout.rank)
            if each.tensor.is_cuda:
                kept = [extent for extent in mine if extent.tensor == index and here]
                found[index] = replace(each, tensor=_on_host(each.tensor, kept), private=True)
            elif not here:
                found[index] = replace(each, private=True)
        self._exchange(layout, tensors, holder, wants)
        return skeleton, found

    def _merge(self, layout: Layout) -> tuple[Tree, dict[int, int]]:
        """Merge all members' states into one, with empty rooms for tensors that are elsewhere.

        Returns the whole state, and the rank that holds each tensor, by the tensor's address.
        """
        own = self._sharding.own_part()
        skeleton, tensors = state.flatten(own, "state")
        entries: dict[str, dict[int, object]] = {name: dict(held) for name, held in own.items()}
        holders = {each.data_ptr(): layout.rank for each in tensors if each.numel()}
        for rank, text in enumerate(self._sharding.hear_all(skeleton)):
            if rank == layout.rank:
                continue
            rooms = _rooms(state.metas(text))
            holders |= {each.data_ptr(): rank for each in rooms if each.numel()}
            for name, held in state.restore(text, rooms).items():
                entries[name] |= held
        whole = self._sharding.common()
        for name, held in entries.items():
            held = {place: held[place] for place in sorted(held)}
            whole[name] = {**whole[name], "state": {**held, **whole[name]["state"]}}
        return whole, holders

    def _exchange(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        holder: Sequence[int | None],
        wants: Sequence[Sequence[Extent]],
    ) -> None:
        sends: list[Message] = []
        for rank in layout.others:
            for extent in wants[rank]:
                if holder[extent.tensor] == layout.rank and extent.start < extent.stop:
                    data = _bytes(tensors[extent.tensor], extent).cpu()
                    sends += [(rank, data), (rank, digest_of(data))]
        receives: list[Message] = []
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for extent in wants[layout.rank]:
            source = holder[extent.tensor]
            if source not in (None, layout.rank) and extent.start < extent.stop:
                data, digest = _bytes(tensors[extent.tensor], extent), _room_for_digest()
                receives += [(source, data), (source, digest)]
                arriving.append((data, digest))
        self._sharding.exchange(sends, receives)
        if not all(torch.equal(digest_of(data), digest) for data, digest in arriving):
            raise Damaged("what another worker holds of the state arrived damaged")


def _rooms(metas: Sequence[Meta]) -> list[torch.Tensor]:
    """Make room for tensors in a mapping of its own.

    Untouched pages take no memory, and all of it goes back to the system with the last tensor; an
    allocator might keep it.
    """
    blanks = [state.allocate(meta, "meta") for meta in metas]
    sizes = [-(-blank.nbytes // ALIGNED) * ALIGNED for blank in blanks]
    mapping = mmap.mmap(-1, max(sum(sizes), 1))
    starts = itertools.accumulate(sizes, initial=0)
    return [
        torch.frombuffer(mapping, dtype=blank.dtype, count=blank.numel(), offset=start).view(
            blank.shape
        )
        if blank.numel()
        else torch.empty_like(blank, device="cpu")
        for blank, start in zip(blanks, starts, strict=False)
    ]


def _bytes(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat[extent.start : extent.stop]


def _on_host(tensor: torch.Tensor, extents: Sequence[Extent]) -> torch.Tensor:
    """Return room for a tensor, with these bytes of it."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    for extent in extents:
        _bytes(room, extent).copy_(_bytes(tensor, extent))
    return room


def _room_for_digest() -> torch.Tensor:
    return torch.zeros(DIGEST_WORDS, dtype=torch.int64)
