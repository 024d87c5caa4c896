"""Pools the rows of many tables in one operation, with the bits of one operation for each table.

A model may have dozens of tables, each with few ids in a batch. Then most of the time goes into the
calls and not into the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.tables.served_tables import FoundRows

Bag = tuple[torch.Tensor, torch.Tensor]  # ids, offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookups:
    """Is a batch's look-ups in all tables, one table after the other.

    `rows`: [rows, dim], `unique`: their ids; `index`: of each id that was looked up, in `rows`.
    `offsets`: where each bag of them starts. `sizes`, `counts`: how many ids and bags each table
    has.
    """

    rows: torch.Tensor
    unique: torch.Tensor
    index: torch.Tensor
    offsets: torch.Tensor
    sizes: list[int]
    counts: list[int]
    mode: str


class _Pooled(torch.autograd.Function):
    """Pools rows of all tables; a table whose result the loss does not use gets no gradient."""

    @staticmethod
    def forward(ctx: Any, lookups: _Lookups, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lookups, ctx.shapes = lookups, [weight.shape for weight in weights]
        ctx.rows = lookups.rows.detach().requires_grad_()
        with torch.enable_grad():
            ctx.pooled = nn.functional.embedding_bag(
                lookups.index, ctx.rows, lookups.offsets, mode=lookups.mode, sparse=True
            )
        return tuple(each.clone() for each in ctx.pooled.detach().split(lookups.counts))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        lookups, dim = ctx.lookups, ctx.rows.shape[1]
        pairs = zip(grads, lookups.counts, strict=True)
        every = [ctx.rows.new_zeros(n, dim) if grad is None else grad for grad, n in pairs]
        (found,) = torch.autograd.grad(ctx.pooled, ctx.rows, torch.cat(every), retain_graph=True)
        places = lookups.unique[found._indices()[0]].split(lookups.sizes)
        parts = zip(grads, ctx.shapes, places, found._values().split(lookups.sizes), strict=True)
        return None, *(
            None
            if grad is None
            else torch.sparse_coo_tensor(at[None], values, shape, check_invariants=False)
            for grad, shape, at, values in parts
        )


def pool_stacked(
    weights: Sequence[torch.Tensor], bags: Sequence[Bag], found: Sequence[FoundRows], mode: str
) -> list[torch.Tensor] | None:
    """Return the pooled rows [bags, dim] of each table, or None if they must be pooled one by one.

    `weights`: the parameters of tables of one width, each looked up once and without padding.
    `found`: the rows of the ids in `bags`.
    """
    indexes, offsets = [each.index for each in found], [each[1] for each in bags]
    if not all(map(_is_plain, (*indexes, *offsets))) or not all(map(len, offsets)):
        return None
    sizes, counts = [len(each) for each in indexes], [len(each) for each in offsets]
    ends, every = torch.tensor(counts).cumsum(0), torch.cat(offsets)
    looked_up = torch.tensor(sizes)
    first, last = every[ends - torch.tensor(counts)], every[ends - 1]
    if bool(first.any()) or bool((last > looked_up).any()):
        return None  # torch refuses them, with a message
    every = every + _repeat_starts(looked_up, counts)
    numbers = torch.tensor([len(each.rows) for each in found])
    index = torch.cat(indexes) + _repeat_starts(numbers, sizes)
    lookups = _Lookups(
        rows=torch.cat([each.rows for each in found]),
        unique=torch.cat([each.unique for each in found]),
        index=index,
        offsets=every,
        sizes=sizes,
        counts=counts,
        mode=mode,
    )
    return list(_Pooled.apply(lookups, *weights))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int64 and tensor.device.type == "cpu"


def _repeat_starts(sizes: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    """Return where each part of these sizes starts, that many times."""
    return (sizes.cumsum(0) - sizes).repeat_interleave(torch.tensor(times))
