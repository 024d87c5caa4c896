"""Starts from a checkpoint: every member of a view reads its share, and they exchange them.

The store verifies the bytes it reads, and a digest of each part verifies the exchange. The script's
objects are overwritten only once all of the state is here. A checkpoint that another job has saved
can be loaded with any number of workers and processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.engine.core.errors import (
    Aborted,
    Damaged,
    StateMismatch,
    UserError,
    WireError,
    WorldError,
    first_line,
)
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.replica.saves import list_replacements
from holdfast.engine.core.sum_plan import part_of
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.state.memory.free_memory import check_room
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
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.state.store.snapshot import ALIGN
from holdfast.engine.state.store.storage import Missing
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.formats import read_tensors
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.state import PROTECTED_AS
from holdfast.engine.train.checkpoint.transfer import PART_BYTES
from holdfast.engine.train.exchange.layout import TAG_STATE, Layout, spread_shares
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tensor_bytes import DIGEST_WORDS, digest_of, memory_of
from holdfast.engine.train.state.saver import say
from holdfast.engine.train.step.mover import Events, StateSource, ViewConnections

SKELETON_BYTES_MAX = 1 << 30
STORE_PAUSE_S = 1.0  # before a store that does not answer is asked again


class NoStore(StateSource):
    """Stands for the checkpoints of a job without a store: there are none."""

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Refuse a state: there is no checkpoint to read. UserError."""
        raise UserError(f"the job is to begin at step {order.step}, and has no --store")


class Restorer(StateSource):
    """Restores the protected objects from checkpoints.

    `loading` is called before anything is overwritten, `restored` with the step afterwards. This
    process has shard `shard` of `procs`.
    """

    def __init__(
        self,
        store: Checkpoints,
        loaded: LoadedState,
        loading: Callable[[], None] = lambda: None,
        restored: Callable[[int], None] = lambda step: None,
        shard: int = 0,
        procs: int = 1,
    ) -> None:
        self._store = store
        self._loaded = loaded
        self._loading = loading
        self._restored = restored
        self._shard = shard
        self._procs = procs

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Read the checkpoint of a step: no member holds the state."""
        step, number = order.step, order.view
        assert at is not None, "a checkpoint is read in a view"
        try:
            try:
                self.restore(step, at.transport, at.layout)
                self._restored(step)
                return (ev.StateObtained(SourceKind.STORE, number),)
            except (Damaged, Missing) as error:
                text = f"the checkpoint of step {step} is not used: {error}"
                other = self.find_replacement(step, at.view.invalidations)
                return (ev.ObtainFailed(SourceKind.STORE, number, text, step, other),)
        except Aborted:
            raise
        except WorldError as error:  # it may answer again: the next view tries
            text = f"the checkpoint of step {step} cannot be read just now: {error}"
            say(text)
            time.sleep(STORE_PAUSE_S)
            return (ev.ObtainFailed(SourceKind.STORE, number, text),)

    def restore(self, step: int, transport: Transport, layout: Layout) -> None:
        """Load the checkpoint of exactly this step, together with all members of the view.

        Damaged; WorldError; StateMismatch; Aborted. UserError: the state does not fit into the free
        memory.
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
        self._read(manifest, places, memory_of(flat), begin, end)
        _exchange(flat, transport, layout)
        self._loading()
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

    def withdraw(self, invalidations: Invalidations) -> None:
        """Remove invalidated checkpoints in a thread, as soon as the store answers."""
        threading.Thread(
            target=self._withdraw, args=(invalidations,), name="holdfast-withdraw", daemon=True
        ).start()

    def _withdraw(self, invalidations: Invalidations) -> None:
        while True:
            try:
                self.withdraw_now(invalidations)
                return
            except WorldError as error:
                say(f"invalidated checkpoints cannot be removed just now: {error}")
                time.sleep(STORE_PAUSE_S)

    def withdraw_now(self, invalidations: Invalidations) -> None:
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


@dataclass(frozen=True, slots=True)
class SavedScript:
    """Is the script's part of a checkpoint: its steps, and its job.values."""

    steps: int
    values: dict[str, Any]


def load_saved(store: str, step: int | None, protected: Mapping[str, Any]) -> SavedScript:
    """Load a checkpoint into these objects; each process may have only a part of them.

    Every process needs host memory for the whole state. Raises UserError.
    """
    checkpoints = Checkpoints(open_storage(store, say), say)
    try:
        step = step if step is not None else _newest(checkpoints, store)
        whole = _read(checkpoints, step)
    except (WorldError, WireError) as error:
        raise UserError(
            f"the checkpoint of step {step} in {store} cannot be used: {first_line(error)}; "
            f"`holdfast ckpt verify {store}` says more"
        ) from None
    script = whole.pop(PROTECTED_AS, None)
    if not isinstance(script, Mapping):
        raise UserError(f"the checkpoint of step {step} in {store} was not saved by a job")
    if list(whole) != list(protected):
        raise UserError(
            f"the checkpoint of step {step} in {store} holds {list(whole)}, and this script "
            f"protects {list(protected)}: protect the same objects by the same names"
        )
    try:
        state.apply_whole(protected, whole)
    except StateMismatch as error:
        problem = first_line(error).partition(": ")[0]
        raise UserError(
            f"the checkpoint of step {step} in {store} does not fit this script: {problem}"
        ) from None
    return SavedScript(steps=script["steps"], values=dict(script["values"]))


def _newest(checkpoints: Checkpoints, store: str) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{store} holds no checkpoint: is it the --store of the other job?")
    return steps[-1]


def _read(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """Read the whole state, with plain values from shard 0. Missing, Damaged, WireError."""
    first = OneEntry(SKELETON, SKELETON_BYTES_MAX)
    manifest = checkpoints.load(step, first)
    tensors = read_tensors(checkpoints, step)
    names = dict.fromkeys(entry.name for entry in entries_of_shard(manifest.entries, 0))
    return state.restore(bytes(first.data), [tensors[name] for name in names])
