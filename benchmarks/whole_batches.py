"""Data of benchmarks that measure steps: fetching a batch at once costs little."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class WholeBatches:
    """Indexes tensors of one length by all samples of a batch in one operation."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(each[indices] for each in self._tensors)


def as_is(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return a batch that is one already: the collate function for WholeBatches."""
    return batch
