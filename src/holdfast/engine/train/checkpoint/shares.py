"""Decides how the workers of a view share the saving of a state that all of them hold.

The tensors' bytes, one tensor after the other, fall into one contiguous share for each rank, cut
between rows (the first dimension). So the shares, in the order of the ranks, are the state again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.partition import part_of
from holdfast.engine.train.checkpoint.state import Extent, Wanted


@dataclass(frozen=True, slots=True)
class Slice:
    """Names rows `start` to `stop` of a tensor; all of it, if it is not `cut`."""

    tensor: int
    start: int
    stop: int
    cut: bool


def share_of(tensors: Sequence[torch.Tensor], rank: int, size: int) -> list[Slice]:
    """Return what rank `rank` of `size` saves; every row of every tensor is in just one share."""
    total = sum(t.nbytes for t in tensors)
    begin, end = part_of(total, rank, size)
    found: list[Slice] = []
    at = 0
    for index, tensor in enumerate(tensors):
        rows = tensor.shape[0] if tensor.dim() else 1
        if tensor.nbytes == 0:
            if begin <= at < end or (rank == size - 1 and at == total):
                found.append(Slice(index, 0, rows, cut=False))
            continue
        row = tensor.nbytes // rows
        start = _clamp(-((at - begin) // row), rows) if rank > 0 else 0
        stop = _clamp(-((at - end) // row), rows) if rank < size - 1 else rows
        if start < stop:
            found.append(Slice(index, start, stop, cut=stop - start < rows))
        at += tensor.nbytes
    return found


def share_selector(size: int) -> Wanted:
    """Return what says which bytes each of `size` ranks needs for its share."""

    def extents_of(_: bytes, tensors: Sequence[torch.Tensor], rank: int) -> list[Extent]:
        found = []
        for each in share_of(tensors, rank, size):
            tensor = tensors[each.tensor]
            row = tensor.nbytes // max(tensor.shape[0] if tensor.dim() else 1, 1)
            found.append(Extent(each.tensor, each.start * row, each.stop * row))
        return found

    return extents_of


def _clamp(row: int, rows: int) -> int:
    return min(max(row, 0), rows)
