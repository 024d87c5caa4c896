"""Collections of tables that several features share, with the names that TorchRec's users know.

A model may have dozens of tables, each with few ids in a batch. Then most of the time goes into the
calls and not into the rows, so the rows of many tables are pooled in one operation, with the bits
of one operation for each table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.tables.embeddings import FP32, Embedding, EmbeddingBag, as_ids, optimizer_of
from holdfast.tables.row_optimizers import RowOptimizer, TableOptimizer
from holdfast.tables.served_tables import FoundRows, ServedOptimizer
from holdfast.tables.table_shape import AGE, KeyRules

Bags = tuple[torch.Tensor, ...]  # ids, offsets, and weights of the ids if there are any
POOLINGS = ("sum", "mean")
Bag = tuple[torch.Tensor, torch.Tensor]  # ids, offsets


@dataclass(kw_only=True)
class EmbeddingConfig:
    """Describes a table `name` that is looked up for sequences of ids.

    It has `num_embeddings` rows of `embedding_dim` numbers. `feature_names`: the inputs that use
    it; by default one of the table's name. First values of rows are uniform from `weight_init_min`
    to `weight_init_max`, by default up to sqrt(1 / num_embeddings) around 0.

    With num_embeddings=None any 64-bit key has a row. `max_capacity`: how many keys have one of
    their own at a time. `admit_after`: how many updates use a key before it gets one. `evict`:
    which keys lose theirs when there is no room, those used least recently ("age") or least often
    ("frequency"). All of these decisions are functions of the job.

        words = EmbeddingConfig(name="words", num_embeddings=1000, embedding_dim=8)
    """

    num_embeddings: int | None
    embedding_dim: int
    name: str = "table"
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    max_capacity: int | None = None
    admit_after: int = 1
    evict: str = AGE

    @property
    def keys(self) -> KeyRules | None:
        """Return the rules of a table of any keys."""
        if self.max_capacity is None:
            return None
        return KeyRules(capacity=self.max_capacity, admit_after=self.admit_after, evict=self.evict)

    @property
    def features(self) -> list[str]:
        """Return the names of the inputs that use the table."""
        return self.feature_names or [self.name]


@dataclass(kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """Describes a table whose rows are pooled for bags of ids; `pooling`: "sum" or "mean".

    All else is as for EmbeddingConfig.

        items = EmbeddingBagConfig(
            name="items", num_embeddings=None, embedding_dim=8, max_capacity=1000, pooling="mean"
        )
    """

    pooling: str = "sum"


C = TypeVar("C", bound=EmbeddingConfig)


class _Tables(nn.Module):
    """Keeps tables by name; nn.ModuleDict refuses names such as "items"."""

    def __init__(self, tables: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(tables)

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Describes one look-up: its feature, its table, and its name in the result."""

    feature: str
    table: str
    result: str

    def of(self, given: Mapping[str, Bags]) -> Bags:
        """Return the feature's input. UserError if there is none."""
        if self.feature not in given:
            there = ", ".join(given) or "none"
            raise UserError(
                f"table {self.table} needs the feature {self.feature!r}, which the input does not "
                f"have: its features are {there}"
            )
        ids, *rest = given[self.feature]
        offsets = [as_ids(self.table, each) for each in rest[:1]]
        return (as_ids(self.table, ids), *offsets, *rest[1:])


class _Collection(nn.Module):
    """Is what both collections share."""

    row_optimizer: TableOptimizer | ServedOptimizer

    def read_rows(self, table: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows [ids, dim] of a table, by default all, as the last step has left them.

        They are on the host, and have no gradient. UserError for an unknown table or id.
        """
        return cast(torch.Tensor, self._find(table).read_rows(ids))

    def read_keys(self, table: str) -> torch.Tensor:
        """Return the keys [n] of a table with num_embeddings=None that have rows of their own.

        They are in growing order, as the last step has left them. UserError for another table.
        """
        return cast(torch.Tensor, self._find(table).read_keys())

    def write_rows(self, table: str, rows: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Give these rows [ids, dim], by default all, to a table: see Embedding.write_rows."""
        self._find(table).write_rows(rows, ids)

    def _find(self, table: str) -> Any:
        tables = next(each for each in self.children() if isinstance(each, _Tables))
        if table not in tables._modules:
            known = ", ".join(tables._modules)
            raise UserError(f"no table is named {table!r}: there are {known}")
        return tables[table]


class EmbeddingBagCollection(_Collection):
    """Pools rows of several tables: TorchRec's EmbeddingBagCollection.

    Input: a KeyedJaggedTensor, for which a KeyedTensor is returned; or a mapping of features to
    (ids, offsets) or (ids, offsets, weights), for which a dictionary of [bags, dim] is returned. A
    feature that several tables use is named feature@table in the result. `tables`: their
    descriptions; `optimizer`: of all their rows; `seed`, `forward_precision`: as for Embedding.
    Raises UserError.

        config = EmbeddingBagConfig(name="items", num_embeddings=1000, embedding_dim=8)
        tables = EmbeddingBagCollection([config], RowWiseAdagrad(lr=0.05))
        job.protect(model=model, optimizer=optimizer, tables=tables)
        ids, offsets = torch.tensor([3, 1, 4, 1]), torch.tensor([0, 3])
        pooled = tables({"items": (ids, offsets)})["items"]  # [2, 8]: of 3, 1, 4 and of 1
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizer,
        *,
        seed: int | None = None,
        forward_precision: str = FP32,
    ) -> None:
        for config in _check_tables(tables):
            if config.pooling not in POOLINGS:
                raise UserError(
                    f"table {config.name}: pooling={config.pooling!r}: give 'sum' or 'mean'"
                )
        made = {
            config.name: EmbeddingBag(
                config.num_embeddings,
                config.embedding_dim,
                mode=config.pooling,
                **_options_of(config, seed, forward_precision),
            )
            for config in tables
        }
        super().__init__()
        self.embedding_bags = _Tables(made)
        self._lookups = _find_lookups(tables)
        self._stacks = _find_stacks(tables, self._lookups)
        self.row_optimizer = optimizer_of(list(made.values()), optimizer)

    def forward(self, features: Any) -> Any:
        """Return the pooled rows of each of `features`, as the class describes."""
        given = _inputs(features)
        fetched = _fetch(self.row_optimizer, self.embedding_bags, self._lookups, given)
        pooled = self._pool_stacks(given, fetched)
        found: dict[str, torch.Tensor] = {}
        for i, (each, rows) in enumerate(zip(self._lookups, fetched, strict=True)):
            if i in pooled:
                found[each.result] = pooled[i]
                continue
            ids, offsets, *weights = each.of(given)
            table, weight = self.embedding_bags[each.table], weights[0] if weights else None
            found[each.result] = table(ids, offsets, weight, found=rows)
        if isinstance(features, Mapping):
            return found
        from torchrec.sparse.jagged_tensor import KeyedTensor

        widths = [each.shape[1] for each in found.values()]
        return KeyedTensor(list(found), widths, torch.cat(list(found.values()), dim=1))

    def _pool_stacks(
        self, given: Mapping[str, Bags], fetched: Sequence[FoundRows | None]
    ) -> dict[int, torch.Tensor]:
        """Pool those look-ups together that can be; returns the results by the look-up's number."""
        pooled: dict[int, torch.Tensor] = {}
        for numbers in self._stacks:
            bags = [self._lookups[i].of(given) for i in numbers]
            rows = [each for i in numbers if (each := fetched[i]) is not None]
            if len(rows) < len(numbers) or any(len(bag) != 2 for bag in bags):
                continue  # the rows are here, or some look-ups have weights
            tables = [self.embedding_bags[self._lookups[i].table] for i in numbers]
            weights = [table.weight for table in tables]
            found = pool_stacked(weights, [(b[0], b[1]) for b in bags], rows, tables[0].mode)
            if found is not None:
                pooled |= zip(numbers, found, strict=True)
        return pooled


class EmbeddingCollection(_Collection):
    """Looks up rows for sequences of ids: TorchRec's EmbeddingCollection.

    Input: a KeyedJaggedTensor, for which a dictionary of JaggedTensor is returned; or a mapping of
    features to ids [...] or (ids, offsets), for which a dictionary of [..., dim] is returned.
    `tables`, `optimizer`, `seed`, `forward_precision`: as for EmbeddingBagCollection. Raises
    UserError.

        config = EmbeddingConfig(name="words", num_embeddings=1000, embedding_dim=8)
        tables = EmbeddingCollection([config], LazyAdam())
        job.protect(model=model, optimizer=optimizer, tables=tables)
        found = tables({"words": torch.tensor([[3, 1], [4, 1]])})["words"]  # [2, 2, 8]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer: RowOptimizer,
        *,
        seed: int | None = None,
        forward_precision: str = FP32,
    ) -> None:
        made = {
            config.name: Embedding(
                config.num_embeddings,
                config.embedding_dim,
                **_options_of(config, seed, forward_precision),
            )
            for config in _check_tables(tables)
        }
        super().__init__()
        self.embeddings = _Tables(made)
        self._lookups = _find_lookups(tables)
        self.row_optimizer = optimizer_of(list(made.values()), optimizer)

    def forward(self, features: Any) -> Any:
        """Return the rows of each of `features`, as the class describes."""
        given = _inputs(features)
        found: dict[str, Any] = {}
        fetched = _fetch(self.row_optimizer, self.embeddings, self._lookups, given)
        for each, rows in zip(self._lookups, fetched, strict=True):
            found[each.result] = self.embeddings[each.table](each.of(given)[0], found=rows)
        if isinstance(features, Mapping):
            return found
        from torchrec.sparse.jagged_tensor import JaggedTensor

        by_feature = features.to_dict()
        return {
            name: JaggedTensor(rows, lengths=by_feature[name.partition("@")[0]].lengths())
            for name, rows in found.items()
        }


def _options_of(config: EmbeddingConfig, seed: int | None, precision: str) -> dict[str, Any]:
    """Return the options of a table; the collection has the optimizer."""
    return {
        "name": config.name,
        "seed": seed,
        "optimizer": None,
        "weight_init_min": config.weight_init_min,
        "weight_init_max": config.weight_init_max,
        "keys": config.keys,
        "forward_precision": precision,
    }


def _fetch(
    optimizer: TableOptimizer | ServedOptimizer,
    tables: _Tables,
    lookups: Sequence[Lookup],
    given: Mapping[str, Bags],
) -> list[FoundRows | None]:
    """Fetch the rows of all look-ups at once, in their order, if they are on servers."""
    if isinstance(optimizer, TableOptimizer):
        return [None] * len(lookups)
    ids = [each.of(given)[0] for each in lookups]
    for each, wanted in zip(lookups, ids, strict=True):
        tables[each.table].check_ids(wanted)
    names = list(tables._modules)
    by_table = {name: [i for i, each in enumerate(lookups) if each.table == name] for name in names}
    wanted_ids = [torch.cat([ids[i].reshape(-1) for i in by_table[name]]) for name in names]
    found: dict[int, FoundRows] = {}
    for name, rows in zip(names, optimizer.find_rows(wanted_ids), strict=True):
        indexes = rows.index.split([ids[i].numel() for i in by_table[name]])
        for i, index in zip(by_table[name], indexes, strict=True):
            found[i] = FoundRows(index.view_as(ids[i]), rows.rows, rows.unique)
    return [found[i] for i in range(len(lookups))]


def _find_lookups(configs: Sequence[C]) -> list[Lookup]:
    every = [feature for config in configs for feature in config.features]
    return [
        Lookup(f, config.name, f"{f}@{config.name}" if every.count(f) > 1 else f)
        for config in configs
        for f in config.features
    ]


def _find_stacks(
    configs: Sequence[EmbeddingBagConfig], lookups: Sequence[Lookup]
) -> list[list[int]]:
    """Return the numbers of look-ups of tables of one width and pooling, in lists.

    Each is the only one of its table, so that gradients add up in the same order.
    """
    found: dict[tuple[int, str], list[int]] = {}
    by_name = {config.name: config for config in configs}
    for i, each in enumerate(lookups):
        config = by_name[each.table]
        if len(config.features) == 1 and config.keys is None:
            found.setdefault((config.embedding_dim, config.pooling), []).append(i)
    return [numbers for numbers in found.values() if len(numbers) > 1]


def _check_tables(tables: Sequence[C]) -> Sequence[C]:
    """Return these tables. UserError if there is none, or two have one name."""
    if not tables:
        raise UserError("a collection needs tables: give at least one config")
    known: dict[str, C] = {}
    for config in tables:
        other = known.setdefault(config.name, config)
        if other is not config:
            sizes = f"{other.embedding_dim} and {config.embedding_dim}"
            raise UserError(
                f"two tables have the name {config.name!r}, with the dimensions {sizes}: give each "
                "a name of its own, and list all features of one table in its feature_names"
            )
        if "." in config.name or not config.name:
            raise UserError(f"table {config.name!r}: a name must not be empty nor have a dot")
    return tables


def _inputs(features: Any) -> dict[str, Bags]:
    """Return ids, offsets and weights by feature. UserError for another type."""
    if isinstance(features, Mapping):
        return {
            name: each if isinstance(each, tuple) else (each,) for name, each in features.items()
        }
    if not hasattr(features, "to_dict"):
        kind = type(features).__name__
        raise UserError(
            f"a collection was given a {kind}: give a KeyedJaggedTensor, or a dictionary of "
            "features with (ids, offsets)"
        )
    found: dict[str, Bags] = {}
    for name, each in features.to_dict().items():
        bags: Bags = (each.values().long(), each.offsets()[:-1].long())
        weights = each.weights_or_none()
        found[name] = bags if weights is None else (*bags, weights)
    return found


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
