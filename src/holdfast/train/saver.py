"""Checkpoints of a running job: a copy at a step boundary, written while training goes on.

The leader saves; if it is lost meanwhile, that checkpoint never was, and the next leader saves the
next one. A save that fails or is still under way costs a checkpoint, never training.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.core.errors import Damaged, HoldfastError, WorldError
from holdfast.store.checkpoints import Checkpoints
from holdfast.store.loading import OneEntry
from holdfast.store.retention import Retention
from holdfast.store.saving import Item
from holdfast.train import state
from holdfast.train.formats import bytes_of, item_of

SKELETON = ".skeleton"  # the entry with everything that is no tensor
SKELETON_BYTES_MAX = 1 << 30
_PLACE = re.compile(r"\[('?)(.*?)\1\]")


class Saver:
    """`saved` is told of each step that has become durable, in a thread of the saver's."""

    def __init__(
        self,
        store: Checkpoints,
        every: int,
        keep: Retention,
        protected: Mapping[str, Any],
        saved: Callable[[int], None],
    ) -> None:
        self._store = store
        self._every = every
        self._keep = keep
        self._protected = protected
        self._saved = saved
        self._copies: list[torch.Tensor] = []  # reused from one checkpoint to the next
        self._thread: list[threading.Thread] = []  # the save under way: none or one
        self._last = 0

    def at_boundary(self, step: int) -> bool:
        """The state is that after `step` steps: copy it, if it is time, and begin to save it.

        Returns whether it did. The caller waits for the copy only.
        """
        due = step > 0 and step % self._every == 0 and step != self._last
        if not due or any(thread.is_alive() for thread in self._thread):
            return False
        self._last = step
        skeleton, names, tensors = state.capture_named(self._protected)
        self._copy(tensors)
        items = [Item(name=SKELETON, data=memoryview(skeleton))]
        named = zip(names, self._copies, strict=True)
        items += [item_of(_readable(name), tensor) for name, tensor in named]
        save = threading.Thread(target=self._save, args=(step, items), daemon=True)
        self._thread = [save]
        save.start()
        return True

    def finish(self, timeout_s: float) -> None:
        """Wait for a save under way."""
        for thread in self._thread:
            thread.join(timeout_s)

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        like = [(t.shape, t.dtype) for t in tensors]
        if [(t.shape, t.dtype) for t in self._copies] != like:
            self._copies = [torch.zeros(shape, dtype=dtype) for shape, dtype in like]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach())

    def _save(self, step: int, items: Sequence[Item]) -> None:
        began = time.monotonic()
        try:
            self._store.save(step, items, {"steps": str(step)})
            self._saved(step)
            self._store.collect(self._keep)
        except HoldfastError as error:
            say(f"step {step} is not saved: {error}")
        else:
            say(f"step {step} is saved, in {time.monotonic() - began:.2f} s")


class Restorer:
    """Begins from a checkpoint. `loading` is called before any object is overwritten."""

    def __init__(self, store: Checkpoints, protected: Mapping[str, Any]) -> None:
        self._store = store
        self._protected = protected

    def restore(self, step: int, loading: Callable[[], None]) -> None:
        """Load the checkpoint of exactly this step. Damaged; WorldError; StateMismatch."""
        first = OneEntry(SKELETON, SKELETON_BYTES_MAX)
        manifest = self._store.load(step, first)
        skeleton = bytes(first.data)
        tensors = [state.empty(meta) for meta in state.metas(skeleton)]
        entries = [e for e in manifest.entries if e.name != SKELETON]
        if [t.nbytes for t in tensors] != [e.size for e in entries]:
            raise Damaged(f"the checkpoint of step {step} contradicts itself")
        places = [(e, bytes_of(t)) for e, t in zip(entries, tensors, strict=True)]
        self._store.load(step, lambda manifest: places)
        loading()
        state.apply(self._protected, skeleton, tensors)

    def older(self, step: int) -> int:
        """The newest checkpoint before `step` every byte of which is right; 0 if there is none."""
        for other in reversed([s for s in self._store.steps() if s < step]):
            try:
                if not self._store.verify(other):
                    return other
            except WorldError as error:
                say(f"the checkpoint of step {other} is not used: {error}")
        return 0


def _readable(path: str) -> str:
    """state['model']['layer.weight'] as model.layer.weight."""
    return _PLACE.sub(r".\2", path).removeprefix("state.")


def say(text: str) -> None:
    """To the worker's log."""
    sys.stderr.write(f"holdfast: {text}\n")
