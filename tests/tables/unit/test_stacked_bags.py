"""Rows of many tables that are pooled in one operation: the same bits as table by table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from holdfast.tables.collections import Bag, pool_stacked
from holdfast.tables.served_tables import FoundRows, as_parameter_of, empty_weight, find_rows

ROWS, DIM = 50, 6


def tables(count: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, DIM, generator=dice) for _ in range(count)]


def fetch(held: Sequence[torch.Tensor], ids: Sequence[torch.Tensor]) -> list[FoundRows]:
    return find_rows(ids, lambda keys: [rows[k] for rows, k in zip(held, keys, strict=True)])


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(empty_weight(ROWS, DIM, None)) for _ in range(count)]


def draw(seed: int) -> list[Bag]:
    """Draw bags of three tables, some of them empty, with ids that repeat."""
    dice, found = torch.Generator().manual_seed(seed), list[Bag]()
    for sizes in ([2, 0, 5, 1], [1, 1], [0, 3, 40, 0, 0]):
        offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        found.append((torch.randint(0, ROWS, (sum(sizes),), generator=dice), offsets))
    return found


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_pooled_rows_and_gradients_have_the_bits_of_each_table(mode: str) -> None:
    bags, alone, together = draw(1), weights(3), weights(3)
    found = fetch(tables(3), [ids for ids, _ in bags])
    plain = [
        nn.functional.embedding_bag(
            rows.index, as_parameter_of(weight, rows), offsets, mode=mode, sparse=True
        )
        for weight, (_, offsets), rows in zip(alone, bags, found, strict=True)
    ]
    stacked = pool_stacked(together, bags, found, mode)
    assert stacked is not None
    for one, other in zip(plain, stacked, strict=True):
        assert torch.equal(one, other)
        one.square().sum().backward()
    sum(each.square().sum() for each in stacked).backward()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.grad._indices(), other.grad._indices())
        assert torch.equal(one.grad._values(), other.grad._values())


def test_a_table_whose_result_is_not_used_has_no_gradient() -> None:
    bags, given = draw(1), weights(3)
    found = fetch(tables(3), [ids for ids, _ in bags])
    pooled = pool_stacked(given, bags, found, "sum")
    assert pooled is not None
    (pooled[0].sum() + pooled[2].sum()).backward(retain_graph=True)
    assert given[1].grad is None
    assert [len(given[i].grad._values()) for i in (0, 2)] == [8, 43]
    pooled[1].sum().backward()
    assert torch.equal(given[1].grad.to_dense()[bags[1][0]], torch.ones(2, DIM))


def test_bags_that_torch_would_refuse_or_that_are_elsewhere_are_left_alone() -> None:
    bags = draw(2)
    found = fetch(tables(3), [ids for ids, _ in bags])
    ids, offsets = bags[0]
    for wrong in (offsets + 1, offsets * 9, offsets[:0], offsets.int(), offsets[None]):
        assert pool_stacked(weights(3), [(ids, wrong), *bags[1:]], found, "sum") is None
