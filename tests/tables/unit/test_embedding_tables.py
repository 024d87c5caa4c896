"""Tables of embeddings: torch's semantics, first values by key, and one sentence for bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.engine.core.errors import UserError
from holdfast.tables import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyRules,
    RowWiseAdagrad,
)
from holdfast.tables.table_shape import fill_rows, seed_of_table

IDS = torch.tensor([4, 1, 1, 9, 0, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])
RULE = RowWiseAdagrad(lr=0.1)


def config(name: str, *features: str, **options: Any) -> EmbeddingBagConfig:
    given = {"num_embeddings": 10, "embedding_dim": 3, **options}
    return EmbeddingBagConfig(name=name, feature_names=list(features), **given)


def test_the_package_offers_servers() -> None:
    assert holdfast.tables.EmbeddingBag is EmbeddingBag


@pytest.mark.parametrize("padding", [None, 1, -1])
def test_an_embedding_is_torchs(padding: int | None) -> None:
    mine = Embedding(10, 3, padding, name="a", seed=1)
    theirs = nn.Embedding(10, 3, padding, sparse=True, _weight=mine.weight.detach().clone())
    grid = IDS.view(2, 3)
    assert torch.equal(mine(grid), theirs(grid))
    for each in (mine, theirs):
        each(grid).square().sum().backward()
    assert torch.equal(mine.weight.grad.to_dense(), theirs.weight.grad.to_dense())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 1])
def test_a_bag_is_torchs(mode: str, padding: int | None) -> None:
    mine = EmbeddingBag(10, 3, mode=mode, padding_idx=padding, name="a", seed=1)
    weight = mine.weight.detach().clone()
    theirs = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=padding, sparse=True, _weight=weight)
    assert torch.equal(mine(IDS, OFFSETS), theirs(IDS, OFFSETS))
    assert torch.equal(mine(IDS.view(2, 3)), theirs(IDS.view(2, 3)))
    if mode == "sum":
        weights = torch.linspace(1, 2, len(IDS))
        assert torch.equal(mine(IDS, OFFSETS, weights), theirs(IDS, OFFSETS, weights))


@pytest.mark.parametrize("keys", [None, KeyRules(capacity=64)])
def test_a_lookup_as_float16_rounds_rows_and_not_the_table(keys: KeyRules | None) -> None:
    count = 10 if keys is None else None
    options = {"name": "a", "seed": 1, "keys": keys}
    plain, half = (
        Embedding(count, 3, **options, forward_precision=each) for each in ("fp32", "fp16")
    )
    assert torch.equal(half(IDS), plain(IDS).half().float())
    assert not torch.equal(half(IDS), plain(IDS))
    assert torch.equal(half.read_rows(IDS), plain(IDS))
    bag = EmbeddingBag(count, 3, mode="sum", **options, forward_precision="fp16")
    assert torch.equal(bag(IDS.view(2, 3)), half(IDS).view(2, 3, 3).sum(1))
    if keys is None:
        half(IDS).square().sum().backward()
        expected = torch.zeros(10, 3).index_add_(0, IDS, 2 * half(IDS).detach())
        assert torch.equal(half.weight.grad.to_dense(), expected)


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(UserError, match="table a: forward_precision='bf16': give 'fp32' or 'fp16'"):
        Embedding(10, 3, name="a", forward_precision="bf16")
    with pytest.raises(UserError, match="forward_precision='half'"):
        EmbeddingBagCollection([config("a")], RULE, forward_precision="half")


def test_padding_begins_at_zero() -> None:
    assert not Embedding(10, 3, 1, seed=1).weight[1].any()
    assert not EmbeddingBag(10, 3, padding_idx=1, seed=1).weight[1].any()


# ---------------------------------------------------------------- first values


def test_a_rows_first_value_follows_from_its_key_alone() -> None:
    every, some = torch.empty(1000, 7), torch.empty(13, 7)
    fill_rows(every, np.arange(1000, dtype=np.uint64), seed=5, low=-1.0, high=2.0)
    fill_rows(some, np.arange(600, 613, dtype=np.uint64), seed=5, low=-1.0, high=2.0)
    assert torch.equal(every[600:613], some)
    assert len(every.unique()) > 6990
    assert every.min() >= -1.0
    assert every.max() < 2.0
    assert every.mean() == pytest.approx(0.5, abs=0.04)


def test_first_values_are_the_same_for_ever() -> None:
    rows = torch.empty(2, 2)
    fill_rows(
        rows,
        np.array([1 << 62, (1 << 62) + 1], dtype=np.uint64),
        seed_of_table(7, "items"),
        low=0.0,
        high=1.0,
    )
    assert [[each.hex() for each in row] for row in rows.tolist()] == [
        ["0x1.0b15060000000p-1", "0x1.5fa96e0000000p-1"],
        ["0x1.0e74400000000p-6", "0x1.4b33040000000p-1"],
    ]


def test_tables_begin_with_values_by_seed_and_name() -> None:
    weights = [
        Embedding(10, 3, name=name, seed=seed).weight
        for name, seed in (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    limit = 10**-0.5
    assert all(w.abs().max() <= limit for w in weights)
    own = Embedding(10, 3, weight_init_min=5.0, weight_init_max=6.0, seed=1).weight
    assert own.min() >= 5.0
    assert own.max() <= 6.0


# ---------------------------------------------------------------- collections


def test_a_collection_pools_each_feature_in_its_table() -> None:
    tables = [config("t", "x", "y"), config("u", "y", "z", pooling="mean", embedding_dim=5)]
    both = EmbeddingBagCollection(tables, RULE, seed=3)
    given = dict.fromkeys("xyz", (IDS, OFFSETS))
    given["x"] = (IDS, OFFSETS, torch.linspace(1, 2, len(IDS)))
    found = both(given)
    t, u = both.embedding_bags["t"], both.embedding_bags["u"]
    assert list(found) == ["x", "y@t", "y@u", "z"]
    assert torch.equal(found["x"], t(*given["x"]))
    assert torch.equal(found["y@t"], t(IDS, OFFSETS))
    assert torch.equal(found["y@u"], u(IDS, OFFSETS))
    assert found["z"].shape == (4, 5)
    names = ["embedding_bags.t.weight", "embedding_bags.u.weight"]
    assert list(both.state_dict()) == names


def test_any_table_name_goes() -> None:
    table = EmbeddingBagCollection([config("items")], RULE)
    assert table({"items": (IDS, OFFSETS)})["items"].shape == (4, 3)


def test_a_collection_of_sequences_looks_rows_up() -> None:
    configs = [EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=3, feature_names=["x"])]
    found = EmbeddingCollection(configs, RULE)({"x": IDS.view(2, 3)})
    assert found["x"].shape == (2, 3, 3)


def test_torchrecs_jagged_tensors_go_in_and_out() -> None:
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    features = jagged.KeyedJaggedTensor(
        keys=["x", "y"],
        values=torch.cat([IDS, IDS.flip(0)]),
        lengths=torch.tensor([2, 0, 3, 1] * 2),
    )
    bags = EmbeddingBagCollection([config("t", "x"), config("u", "y")], RULE, seed=3)
    found = bags(features)
    plain = bags({"x": (IDS, OFFSETS), "y": (IDS.flip(0), OFFSETS)})
    assert found.keys() == ["x", "y"]
    assert all(torch.equal(found[name], plain[name]) for name in "xy")
    configs = [EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=3, feature_names=["x"])]
    sequences = EmbeddingCollection(configs, RULE, seed=3)
    rows = sequences(features)["x"]
    assert torch.equal(rows.values(), sequences({"x": IDS})["x"])
    assert rows.lengths().tolist() == [2, 0, 3, 1]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([3, -1]), "table a: id -1 is negative"),
        (torch.tensor([10]), "table a: id 10 is beyond its num_embeddings=10"),
    ],
)
def test_an_unknown_id_is_named(ids: torch.Tensor, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Embedding(10, 3, name="a")(ids)
    with pytest.raises(UserError, match=words):
        EmbeddingBag(10, 3, name="a")(ids[None])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Embedding(0, 3), "num_embeddings=0, embedding_dim=3: both must be 1 or more"),
        (lambda: EmbeddingBag(3, -1), "embedding_dim=-1"),
        (lambda: Embedding(None, 3, name="b"), "table b: num_embeddings=None"),
        (lambda: EmbeddingBag(3, 3, mode="max"), "mode='max': give 'sum' or 'mean'"),
        (lambda: Embedding(3, 3, weight_init_min=1.0), "its first values are from 1.0"),
        (lambda: EmbeddingBagCollection([], RULE), "needs tables"),
        (
            lambda: EmbeddingBagCollection([config("t"), config("t", embedding_dim=4)], RULE),
            "two tables have the name 't', with the dimensions 3 and 4",
        ),
        (lambda: EmbeddingBagCollection([config("t", pooling="max")], RULE), "pooling='max'"),
        (lambda: EmbeddingBagCollection([config("a.b")], RULE), "must not be empty nor have a dot"),
    ],
)
def test_impossible_tables_are_named(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_wrong_inputs_are_named() -> None:
    bags = EmbeddingBagCollection([config("t", "x")], RULE)
    with pytest.raises(UserError, match="needs the feature 'x', which the input does not have"):
        bags({"y": (IDS, OFFSETS)})
    with pytest.raises(UserError, match="was given a Tensor: give a KeyedJaggedTensor"):
        bags(IDS)
