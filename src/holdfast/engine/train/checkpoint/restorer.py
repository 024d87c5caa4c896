"""Starts from a checkpoint: every member of a view reads its share, and they exchange them.

The store verifies the bytes it reads, and a digest of each part verifies the exchange. The script's
objects are overwritten only once all of the state is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from holdfast.engine.core.errors import Aborted, Damaged, WireError
from holdfast.engine.core.invalidations import Invalidation, Invalidations
from holdfast.engine.core.partition import part_of
from holdfast.engine.core.replica.saves import list_replacements
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.state.store.checkpoint_reading import OneEntry, load, load_range
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import (
    PROCS,
    SKELETON,
    Entry,
    Manifest,
    is_of_tables,
    name_in_shard,
)
from holdfast.engine.state.store.snapshot import ALIGN
from holdfast.engine.state.store.storage import Missing
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.formats import bytes_of
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.room import check_room
from holdfast.engine.train.checkpoint.saver import say
from holdfast.engine.train.checkpoint.transfer import DIGEST_WORDS, PART_BYTES, digest_of
from holdfast.engine.train.exchange.layout import TAG_STATE, Layout, spread_shares
from holdfast.engine.train.exchange.seam import Transport

SKELETON_BYTES_MAX = 1 << 30


class Restorer:
    """Restores the protected objects; this process has shard `shard` of `procs`."""

    def __init__(
        self, store: Checkpoints, loaded: LoadedState, shard: int = 0, procs: int = 1
    ) -> None:
        self._store = store
        self._loaded = loaded
        self._shard = shard
        self._procs = procs

    def restore(
        self, step: int, transport: Transport, layout: Layout, loading: Callable[[], None]
    ) -> None:
        """Load the checkpoint of exactly this step, together with all members of the view.

        `loading` is called before anything is overwritten. Damaged; WorldError; StateMismatch;
        Aborted. UserError: the state does not fit into the free memory.
        """
        first = OneEntry(name_in_shard(SKELETON, self._shard), SKELETON_BYTES_MAX)
        manifest = self._store.load(step, first)
        if manifest.about.get(PROCS, "1") != str(self._procs):
            raise Damaged(
                f"the checkpoint of step {step} is of workers of {manifest.about.get(PROCS, 1)} "
                f"processes, and this job's have {self._procs}"
            )
        skeleton = bytes(first.data)
        try:
            metas = state.metas(skeleton)
            size = sum(-(-state.size_of(meta) // ALIGN) * ALIGN for meta in metas)
        except WireError as error:
            raise Damaged(f"the checkpoint of step {step} cannot be used here: {error}") from None
        check_room(size, f"the checkpoint of step {step}")
        flat, tensors, starts = _lay_out(metas)
        entries = entries_of_shard(manifest.entries, self._shard)
        places = _places(entries, tensors, starts)
        if places is None:
            raise Damaged(f"the checkpoint of step {step} contradicts itself")
        begin, end = part_of(flat.numel(), layout.rank, layout.size, ALIGN)
        self._read(manifest, places, bytes_of(flat), begin, end)
        _exchange(flat, transport, layout)
        loading()
        self._loaded.load(skeleton, tensors)

    def find_replacement(self, step: int, invalidations: Invalidations) -> int:
        """Find an undamaged checkpoint in place of a damaged one; all its bytes are verified.

        `core/replica/saves.py` decides which are tried. Returns 0 if there is none. WorldError
        when the store does not answer.
        """
        stored: dict[int, ViewNumber | None] = {}
        for other in self._store.steps():
            try:
                made_in = self._store.manifest(other).order.view
            except (Damaged, Missing):
                continue
            stored[other] = made_in if made_in != NO_VIEW else None
        return next(filter(self._is_right, list_replacements(stored, step, invalidations)), 0)

    def _is_right(self, step: int) -> bool:
        try:
            return not self._store.verify(step)
        except (Damaged, Missing):
            return False

    def withdraw(self, invalidations: Sequence[Invalidation]) -> None:
        """Remove invalidated checkpoints, and prevent saves of invalidated state. WorldError."""
        for invalidation in invalidations:
            for step in self._store.withdraw(invalidation.after, invalidation.view):
                say(f"the checkpoint of step {step} is removed: something wrong was used before it")

    def _read(
        self,
        manifest: Manifest,
        places: Sequence[tuple[Entry, int]],
        memory: memoryview,
        begin: int,
        end: int,
    ) -> None:
        """Read bytes `begin` to `end` of the state's memory."""
        whole = []
        for entry, start in places:
            first, last = max(start, begin), min(start + entry.size, end)
            if last - first == entry.size:
                whole.append((entry, memory[first:last]))
            elif first < last:
                with self._store.reading() as storage:
                    load_range(storage, manifest, entry, first - start, memory[first:last])
        with self._store.reading() as storage:
            load(storage, manifest, whole)


def entries_of_shard(entries: Sequence[Entry], shard: int) -> list[Entry]:
    """Return the entries of a shard's tensors: those after its skeleton, up to the next one's."""
    entries = [entry for entry in entries if not is_of_tables(entry.name)]
    names = [entry.name for entry in entries]
    skeletons = {name_in_shard(SKELETON, shard), name_in_shard(SKELETON, shard + 1)}
    at = [place for place, name in enumerate(names) if name in skeletons]
    return list(entries[at[0] + 1 : at[1] if len(at) > 1 else None])


def _lay_out(metas: Sequence[state.Meta]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    """Allocate one memory for the whole state; return its tensors, and where each begins."""
    sizes = [state.size_of(meta) for meta in metas]
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // ALIGN) * ALIGN
    flat = torch.empty(at, dtype=torch.uint8)
    tensors = []
    for (dtype, shape), start, size in zip(metas, starts, sizes, strict=True):
        part = flat[start : start + size].view(getattr(torch, dtype))
        tensors.append(part.view(shape))
    return flat, tensors, starts


def _places(
    entries: Sequence[Entry], tensors: Sequence[torch.Tensor], starts: Sequence[int]
) -> list[tuple[Entry, int]] | None:
    """Find where in the memory the entries belong, in their order; None if they do not fit."""
    places: list[tuple[Entry, int]] = []
    supply = iter(entries)
    for tensor, start in zip(tensors, starts, strict=True):
        at, whole = 0, False
        while not whole:
            entry = next(supply, None)
            if entry is None or at + entry.size > tensor.nbytes:
                return None
            places.append((entry, start + at))
            at += entry.size
            whole = at == tensor.nbytes
    return places if next(supply, None) is None else None


def _parts(flat: torch.Tensor, rank: int, size: int) -> Iterator[torch.Tensor]:
    begin, end = part_of(flat.numel(), rank, size, ALIGN)
    for start in range(begin, end, PART_BYTES):
        yield flat[start : min(start + PART_BYTES, end)]


def _exchange(flat: torch.Tensor, transport: Transport, layout: Layout) -> None:
    """Exchange shares, so that every member has all. Aborted."""
    shares: list[list[torch.Tensor]] = []
    arriving = []
    for peer in range(layout.size):
        share: list[torch.Tensor] = []
        for part in _parts(flat, peer, layout.size):
            if peer == layout.rank:
                share += [part, digest_of(part)]
            else:
                digest = torch.zeros(DIGEST_WORDS, dtype=torch.int64)
                share += [part, digest]
                arriving.append((peer, part, digest))
        shares.append(share)
    spread_shares(transport, range(layout.size), layout.rank, shares, TAG_STATE)
    for peer, part, digest in arriving:
        if not torch.equal(digest_of(part), digest):
            raise Aborted(f"the state that rank {peer} read arrived damaged")
