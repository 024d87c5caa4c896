"""Reads datasets whose samples can be asked for by index."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from holdfast.engine.core.errors import UserError


def dataset_length(dataset: Any) -> int:
    """Return the number of samples; UserError unless the dataset is map-style and has a length."""
    name = f"the dataset, a {type(dataset).__name__},"
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"{name} is an IterableDataset, whose samples cannot be asked for by index: give "
            "job.batches a map-style dataset with __getitem__ and __len__, or job.stream a function"
        )
    if not hasattr(dataset, "__len__"):
        raise UserError(f"{name} has no __len__: give it one that returns its number of samples")
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise UserError(f"{name} has no __getitem__: give it one that returns a sample by index")
    return len(dataset)


def load_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return these samples: at once, if the dataset offers that."""
    if getattr(dataset, "__getitems__", None):
        found: list[Any] = dataset.__getitems__(indices)
        return found
    return [dataset[index] for index in indices]
