"""Optimizers of rows: torch's formulas bit for bit, and no row's update depends on other rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.tables import SGD, Adagrad, LazyAdam, RowOptimizer, RowWiseAdagrad
from holdfast.tables.row_optimizers import TableOptimizer

ROWS, STEPS = 41, 12
RULES = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, initial_accumulator_value=0.5),
    RowWiseAdagrad(lr=0.1),
    LazyAdam(lr=0.01),
    LazyAdam(lr=0.01, betas=(0.5, 0.9), eps=1e-3),
]


def dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tables(dim: int, rule: RowOptimizer) -> tuple[nn.Embedding, TableOptimizer, nn.Embedding]:
    """Return a table with its optimizer, and another table that begins alike."""
    first = nn.Embedding(ROWS, dim, sparse=True)
    with torch.no_grad():
        first.weight.normal_(generator=dice(1))
    second = nn.Embedding(ROWS, dim, sparse=True, _weight=first.weight.detach().clone())
    return first, TableOptimizer([first.weight], rule), second


def learn(table: nn.Embedding, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """Take a step whose gradient depends on the rows and their places among `ids`."""
    optimizer.zero_grad()
    weights = torch.linspace(0.3, 1.7, ids.numel())[:, None]
    (table(ids).sin() * weights).sum().backward()
    if table.sparse:  # as in a job: torch's SGD would add the rows of one id one after the other
        table.weight.grad = table.weight.grad.coalesce()
    optimizer.step()


@pytest.mark.parametrize("dim", [1, 5, 16])
@pytest.mark.parametrize(
    ("rule", "other", "options"),
    [
        (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
        (Adagrad(lr=0.1), torch.optim.Adagrad, {"lr": 0.1}),
        (LazyAdam(lr=0.01), torch.optim.SparseAdam, {"lr": 0.01}),
    ],
)
def test_rows_that_some_steps_use_are_updated_as_torch_does(
    rule: RowOptimizer, other: Any, options: dict[str, float], dim: int
) -> None:
    mine, optimizer, theirs = tables(dim, rule)
    reference = other([theirs.weight], **options)
    for step in range(STEPS):
        ids = torch.randint(ROWS, (30,), generator=dice(step))
        learn(mine, optimizer, ids)
        learn(theirs, reference, ids)
        assert torch.equal(mine.weight, theirs.weight), step


def test_momentum_is_that_of_torch_where_each_step_uses_each_row() -> None:
    mine, optimizer, theirs = tables(5, SGD(lr=0.1, momentum=0.9))
    theirs.sparse = False
    reference = torch.optim.SGD([theirs.weight], lr=0.1, momentum=0.9, foreach=False)
    for _ in range(STEPS):
        learn(mine, optimizer, torch.arange(ROWS))
        learn(theirs, reference, torch.arange(ROWS))
        assert torch.equal(mine.weight, theirs.weight)


def test_row_wise_adagrad_is_fbgemms_formula() -> None:
    """Computed in double precision: w -= lr * g / (sqrt(sum of mean squares) + eps)."""
    rule = RowWiseAdagrad(lr=0.1, eps=1e-8)
    rows, total = torch.randn(7, 6, generator=dice(1)), torch.zeros(7, 1)
    exact, sums = rows.double(), [0.0] * 7
    for step in range(1, STEPS):
        grads = torch.randn(7, 6, generator=dice(step))
        rule.update(rows, {"sum": total}, grads, rule.lr, step)
        for i, grad in enumerate(grads.double()):
            sums[i] += float((grad**2).mean())
            exact[i] -= 0.1 * grad / (math.sqrt(sums[i]) + 1e-8)
    torch.testing.assert_close(rows.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total[:, 0].double(), torch.tensor(sums, dtype=torch.float64))


@pytest.mark.parametrize("dim", [1, 3, 8, 33])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rows_update_does_not_depend_on_the_rows_beside_it(rule: RowOptimizer, dim: int) -> None:
    rows, grads = torch.randn(2, ROWS, dim, generator=dice(3))
    slots = {
        name: torch.rand(ROWS, width, generator=dice(4))
        for name, (width, _) in rule.slots(dim).items()
    }
    apart = rows.clone(), {name: each.clone() for name, each in slots.items()}
    rule.update(rows, slots, grads, rule.lr, 5)
    for i in range(ROWS):
        row = apart[0][i : i + 1]
        kept = {name: each[i : i + 1] for name, each in apart[1].items()}
        rule.update(row, kept, grads[i : i + 1], rule.lr, 5)
    assert torch.equal(rows, apart[0])
    assert all(torch.equal(slots[name], apart[1][name]) for name in slots)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rows_that_a_step_has_not_used_stay_as_they_are(rule: RowOptimizer) -> None:
    table, optimizer, before = tables(4, rule)
    learn(table, optimizer, torch.tensor([3, 7, 3]))
    changed = (table.weight != before.weight).any(1).nonzero()[:, 0]
    assert changed.tolist() == [3, 7]


def test_a_scheduler_sets_the_rate_of_the_rows() -> None:
    table, optimizer, before = tables(4, SGD(lr=0.1))
    optimizer.param_groups[0]["lr"] = 0.0
    learn(table, optimizer, torch.arange(ROWS))
    assert torch.equal(table.weight, before.weight)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(lr=-1.0), r"SGD\(lr=-1.0\): give 0 or more"),
        (lambda: SGD(momentum=-0.1), r"SGD\(momentum=-0.1\)"),
        (lambda: Adagrad(eps=float("nan")), r"Adagrad\(eps=nan\)"),
        (lambda: Adagrad(initial_accumulator_value=-1.0), "initial_accumulator_value=-1.0"),
        (lambda: RowWiseAdagrad(eps=-1.0), r"RowWiseAdagrad\(eps=-1.0\)"),
        (lambda: LazyAdam(betas=(0.9, 1.0)), r"betas\[1\]=1.0\): give 0 to 1"),
    ],
)
def test_impossible_options_are_named(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_row_wise_adagrad_is_near_fbgemm_itself() -> None:
    """It adds in another order, so the last bit of a number may differ."""
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    mine, optimizer, _ = tables(8, RowWiseAdagrad(lr=0.1, eps=1e-8))
    theirs = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 8, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
    )
    weight = theirs.split_embedding_weights()[0]
    weight.copy_(mine.weight.detach())
    offsets = torch.arange(21)
    for step in range(STEPS):
        ids, grads = torch.randint(ROWS, (20,), generator=dice(step)), torch.rand(20, 8)
        theirs(ids, offsets).backward(grads)
        optimizer.zero_grad()
        mine(ids).backward(grads)
        optimizer.step()
    torch.testing.assert_close(weight, mine.weight.detach(), rtol=0, atol=1e-6)
