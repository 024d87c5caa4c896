"""Recognises kinds of datasets: map-style ones, and ones that run none of the script's code.

Only the script's code draws random numbers: where none of it runs, the generators need not be
keyed, which would take a good part of the time of a batch of rows. Invariant: data called plain
here has the same bits in any state of the global generators, and leaves them alone. Types are
compared exactly, as a subclass may draw; an unknown type is not plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from holdfast.engine.core.errors import UserError

DEPTH_MAX = 4  # how deep lists, tuples and dictionaries may be nested in one sample

_HOLDERS = frozenset({list, tuple, dict})
_LEAVES = frozenset(
    {torch.Tensor, np.ndarray, np.float32, np.float64, np.int32, np.int64, bool, int, float, str}
)
# A script may add functions of its own to PyTorch's table: those are not in this set.
_COLLATING = frozenset(
    each
    for each in torch_collate.default_collate_fn_map.values()
    if each.__module__ == torch_collate.__name__
)


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


def is_plain_dataset(dataset: Any) -> bool:
    """Return whether reading a sample only looks it up, whatever the sample is."""
    inner = _unwrap_subsets(dataset)
    return type(inner) in (list, tuple, np.ndarray) or holds_tensors(inner)


def holds_tensors(dataset: Any) -> bool:
    """Return whether the dataset is plain, and its samples are tensors or tuples of tensors."""
    inner = _unwrap_subsets(dataset)
    if type(inner) is not TensorDataset or "__getitems__" in vars(inner):
        return type(inner) is torch.Tensor
    return all(type(each) is torch.Tensor for each in inner.tensors)


def is_plain_collate(collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether plain samples are collated by PyTorch's own code alone."""
    table = torch_collate.default_collate_fn_map
    return collate is default_collate and _COLLATING.issuperset(table.values())


def are_plain_samples(samples: Sequence[Any]) -> bool:
    """Return whether the samples consist of tensors, arrays, numbers and strings alone."""
    for _ in range(DEPTH_MAX):
        kinds = set(map(type, samples))
        holders = kinds - _LEAVES
        if not holders:
            return True
        if not holders <= _HOLDERS:
            return False
        if holders != kinds:
            samples = [each for each in samples if type(each) in holders]
        values = [each.values() for each in samples if type(each) is dict] if dict in kinds else ()
        # a dictionary's keys count, too
        samples = list(chain.from_iterable(chain(samples, values)))
    return _LEAVES.issuperset(map(type, samples))


def _unwrap_subsets(dataset: Any) -> Any:
    """Return the dataset behind a plain subset, or else the dataset itself."""
    while type(dataset) is Subset:
        if type(dataset.indices) not in (list, range) or "__getitems__" in vars(dataset):
            break
        dataset = dataset.dataset
    return dataset
