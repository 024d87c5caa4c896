"""Reads DataLoaders for trainers that count the steps of an epoch before they train."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Batches, Job


def plain_batches(job: Job, loader: DataLoader[Any]) -> Batches:
    """Return the job's batches of a loader; UserError for a sampler, whose epochs have no length.

    A loop of the script's own, over `job.steps`, takes any sampler.
    """
    data = job.batches(loader)
    if not isinstance(data, Batches):
        raise UserError(
            f"this DataLoader draws samples by a {type(loader.sampler).__name__}: give one with "
            "shuffle=True or shuffle=False, or write the loop with job.steps"
        )
    return data
