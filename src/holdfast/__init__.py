"""Holdfast is fault-tolerant distributed training whose result depends on the job alone.

    import holdfast

    job = holdfast.join()
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(dataset, batch_size=32)
    for step in job.steps(data, until=1000):
        for inputs, targets in step:
            step.backward(loss_fn(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

Names that need torch are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.engine.core.errors import (
    RELEASE,
    HoldfastError,
    InvariantError,
    StateMismatch,
    UserError,
    WorldError,
)
from holdfast.old_paths import install

if TYPE_CHECKING:
    from holdfast import tables
    from holdfast import tables as servers
    from holdfast.engine.commands.session_launch import Launched, launch
    from holdfast.engine.state.store.data_index import VerifiedFiles
    from holdfast.engine.train.job import Batches, Epoch, Job, RankState, Step, Stream, Task, join

__all__ = [
    "Batches",
    "Epoch",
    "HoldfastError",
    "InvariantError",
    "Job",
    "Launched",
    "RankState",
    "StateMismatch",
    "Step",
    "Stream",
    "Task",
    "UserError",
    "VerifiedFiles",
    "WorldError",
    "join",
    "launch",
    "servers",
    "tables",
]
__version__ = RELEASE
install()

_TRAINING = ("Batches", "Epoch", "Job", "RankState", "Step", "Stream", "Task", "join")


def __getattr__(name: str) -> Any:
    """Import torch only in processes that train: the control plane must start in an instant."""
    if name in _TRAINING:
        from holdfast.engine.train import job

        return getattr(job, name)
    if name in ("tables", "servers"):  # the second is the name that it had before
        return import_module("holdfast.tables")
    if name == "VerifiedFiles":
        from holdfast.engine.state.store.data_index import VerifiedFiles

        return VerifiedFiles
    if name in ("Launched", "launch"):
        return getattr(import_module("holdfast.engine.commands.session_launch"), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
