"""Loads the state that another job has saved, with any number of workers and processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine.core.errors import StateMismatch, UserError, WireError, WorldError, first_line
from holdfast.engine.state.store.checkpoint_reading import OneEntry
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import SKELETON
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.formats import read_tensors
from holdfast.engine.train.checkpoint.restorer import SKELETON_BYTES_MAX, entries_of_shard
from holdfast.engine.train.checkpoint.saver import say
from holdfast.engine.train.checkpoint.state import PROTECTED_AS


@dataclass(frozen=True, slots=True)
class SavedScript:
    """Is the script's part of a checkpoint: its steps, and its job.values."""

    steps: int
    values: dict[str, Any]


def load_saved(store: str, step: int | None, protected: Mapping[str, Any]) -> SavedScript:
    """Load a checkpoint into these objects; each process may have only a part of them.

    Every process needs host memory for the whole state meanwhile. Raises UserError.
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
