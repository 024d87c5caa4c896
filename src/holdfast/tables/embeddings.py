"""Tables for scripts, with the arguments and the semantics of torch's Embedding and EmbeddingBag.

Their gradients are sparse, and the job updates the used rows itself when the script calls its
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import TABLES
from holdfast.engine.train.job import count_servers
from holdfast.engine.train.script.optimizer_watch import check_lookup
from holdfast.engine.train.step.table_parameters import AbsentWeight, collect_keys
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.keyed_rows import KeyedTable, find_keys
from holdfast.tables.row_optimizers import SGD, RowOptimizer, TableOptimizer
from holdfast.tables.served_tables import (
    FoundRows,
    ServedOptimizer,
    as_parameter_of,
    empty_weight,
    find_rows,
)
from holdfast.tables.server_wire import round_to_half
from holdfast.tables.table_shape import (
    AGE,
    FREQUENCY,
    KeyRules,
    TableShape,
    fill_rows,
    seed_of_table,
)

_DEFAULT = SGD()
FP32, FP16 = "fp32", "fp16"  # as TorchRec names them
NEWEST = 1 << 62  # a version after all updates
WRITING = ", write or load them with write_rows(rows, ids) or load_state_dict"


def is_half(name: str, precision: str) -> bool:
    """Return whether a table's rows are read as float16. UserError for an unknown precision."""
    if precision not in (FP32, FP16):
        raise UserError(f"table {name}: forward_precision={precision!r}: give {FP32!r} or {FP16!r}")
    return precision == FP16


def as_ids(table: str, ids: torch.Tensor) -> torch.Tensor:
    """Return ids or offsets of any type of whole numbers as int64. UserError for another type."""
    if ids.dtype == torch.int64:
        return ids
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise UserError(
            f"table {table}: ids of type {ids.dtype} are no whole numbers: give torch.int64"
        )
    return ids.long()


class TableSpec:
    """Describes a table of rows of `dim` numbers, first drawn uniformly from `limits`.

    `count`: how many rows; None: one for any 64-bit key, by `rules`. Raises UserError for sizes and
    limits that no table can have.
    """

    def __init__(
        self,
        name: str,
        count: int | None,
        dim: int,
        limits: tuple[float | None, float | None],
        rules: KeyRules | None = None,
    ) -> None:
        if count is None and rules is None:
            raise UserError(
                f"table {name}: num_embeddings=None, rows for any key, needs max_capacity: give "
                "the number of keys that have rows at a time"
            )
        if count is not None and rules is not None:
            raise UserError(
                f"table {name}: num_embeddings={count} and max_capacity={rules.capacity}: give "
                "num_embeddings=None for rows for any key, or leave out max_capacity"
            )
        size = count if rules is None else rules.capacity
        assert size is not None
        if size < 1 or dim < 1:
            named = "num_embeddings" if rules is None else "max_capacity"
            sizes = f"{named}={size}, embedding_dim={dim}"
            raise UserError(f"table {name}: {sizes}: both must be 1 or more")
        usual = math.sqrt(1 / size)
        low = -usual if limits[0] is None else limits[0]
        high = usual if limits[1] is None else limits[1]
        if not low <= high:
            raise UserError(f"table {name}: its first values are from {low} to {high}: swap these")
        self.name, self.count, self.dim, self.limits = name, count or 0, dim, (low, high)
        self.rules = _check_rules(name, rules)
        self.is_served = count_servers(TABLES) > 0  # its rows are on the job's servers
        self.reads_half = False  # steps read its rows as float16
        self.keyed: KeyedTable | None = None  # its rows, if these are here and have keys
        self.optimizer: TableOptimizer | ServedOptimizer  # updates its rows

    def make_weight(self, device: Any) -> torch.Tensor:
        """Return the tensor for the table's parameter, [count, dim]."""
        if self.is_absent:
            return empty_weight(self.count, self.dim, device)
        with self._making_room():
            return torch.empty(self.count, self.dim, device=device, dtype=torch.float32)

    @property
    def is_absent(self) -> bool:
        """Return whether the rows are not in the table's parameter."""
        return self.is_served or self.rules is not None

    def replace_weight(self, weight: torch.Tensor) -> nn.Parameter:
        """Return a parameter that refuses what needs the rows, which it has not."""
        where = "are on the job's servers" if self.is_served else "are known by their keys"
        keyed = self.rules is not None
        found = AbsentWeight.of(
            weight.detach(),
            f"the rows of table {self.name} {where}, not in it: read them with read_rows(ids)"
            f"{'' if keyed else WRITING}, and leave the table out of averages, norms and copies",
        )
        if keyed:
            collect_keys(found)
        return found

    def begin(
        self, table: Embedding | EmbeddingBag, seed: int | None, rule: RowOptimizer | None
    ) -> None:
        """Give all rows their first values, 0 for padding, and the table its own optimizer.

        `rule`: None if the optimizer of a collection updates the rows.
        """
        found = seed_of_table(torch.initial_seed() if seed is None else seed, self.name)
        self.shape = TableShape(
            name=self.name,
            count=self.count,
            dim=self.dim,
            seed=found,
            limits=self.limits,
            padding=table.padding_idx,
            keyed=self.rules,
        )
        if not self.is_served and self.rules is None:
            self._fill(table.weight)
        if rule is not None:
            table.row_optimizer = optimizer_of([table], rule)

    def keep(self, rule: RowOptimizer) -> dict[str, torch.Tensor]:
        """Make room for rows by key in this process; returns the arrays, by name."""
        with self._making_room():
            self.keyed = KeyedTable(self.shape, range(SHARDS), rule, undoes=False)
        return self.keyed.arrays

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        """Name the table if it does not fit. UserError."""
        try:
            yield
        # Torch raises RuntimeError when memory has run out.
        except (RuntimeError, MemoryError):
            rows = self.count if self.rules is None else self.rules.capacity
            named = "num_embeddings" if self.rules is None else "max_capacity"
            raise UserError(
                f"table {self.name}: {rows * self.dim * 4 / 1e9:.0f} GB for its rows are more than "
                f"this worker has: make {named}={rows} smaller, or start servers (--servers)"
            ) from None

    @torch.no_grad()
    def _fill(self, weight: torch.Tensor) -> None:
        keys = np.arange(self.count, dtype=np.uint64)
        fill_rows(weight, keys, self.shape.seed, *self.limits)
        if self.shape.padding is not None:
            weight[self.shape.padding].zero_()

    def take_rows(self, rows: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the ids [n] of rows [n, dim] that are written. UserError if these do not fit."""
        if self.rules is not None:
            raise UserError(
                f"table {self.name}: a table with num_embeddings=None takes no rows from outside, "
                "because its keys get theirs as steps use them: give num_embeddings for rows that "
                "are written or loaded"
            )
        found = (
            torch.arange(self.count) if ids is None else as_ids(self.name, ids).reshape(-1).cpu()
        )
        if list(rows.shape) != [len(found), self.dim]:
            raise UserError(
                f"table {self.name}: rows of shape {list(rows.shape)} for {len(found)} ids: give "
                f"{[len(found), self.dim]}"
            )
        self.check(found)
        if ids is not None and len(found.unique()) < len(found):
            raise UserError(f"table {self.name}: an id is written twice at once: give each id once")
        return found

    def check(self, ids: torch.Tensor) -> None:
        """Raise UserError for ids that the table does not have. Ids on a GPU are not looked at."""
        if ids.device.type != "cpu" or not ids.numel() or self.rules is not None:
            return
        least, most = (int(each) for each in torch.aminmax(ids))
        if least < 0:
            raise UserError(f"table {self.name}: id {least} is negative: ids are 0 or more")
        if most >= self.count:
            raise UserError(
                f"table {self.name}: id {most} is beyond its num_embeddings={self.count}: give "
                "the table more rows, or take ids modulo that number"
            )


def _check_rules(name: str, rules: KeyRules | None) -> KeyRules | None:
    """Return these rules. UserError for rules that make no sense."""
    if rules is None:
        return None
    if rules.admit_after < 1:
        raise UserError(f"table {name}: admit_after={rules.admit_after}: give 1 or more updates")
    if rules.evict not in (AGE, FREQUENCY):
        raise UserError(f"table {name}: evict={rules.evict!r}: give {AGE!r} or {FREQUENCY!r}")
    return rules


def optimizer_of(
    tables: Sequence[Embedding | EmbeddingBag], rule: RowOptimizer
) -> TableOptimizer | ServedOptimizer:
    """Return the optimizer of the rows of these tables, here or on the job's servers."""
    found = _make_optimizer(tables, rule)
    for table in tables:
        table._table.optimizer = found
    return found


def _make_optimizer(
    tables: Sequence[Embedding | EmbeddingBag], rule: RowOptimizer
) -> TableOptimizer | ServedOptimizer:
    weights = [table.weight for table in tables]
    specs = [table._table for table in tables]
    if specs[0].is_served:
        shapes, as_half = [spec.shape for spec in specs], specs[0].reads_half
        return ServedOptimizer(weights, shapes, rule, as_half=as_half)
    keyed = {}
    for table, spec in zip(tables, specs, strict=True):
        if spec.rules is not None:
            for name, array in spec.keep(rule).items():
                table.register_buffer(name, array)
            assert spec.keyed is not None
            keyed[table.weight] = spec.keyed
    return TableOptimizer(weights, rule, keyed, [spec.name for spec in specs])


class _Rows(nn.Module):
    """Is what both kinds of tables share: rows on servers are fetched, and no part of the state."""

    row_optimizer: TableOptimizer | ServedOptimizer
    _table: TableSpec
    if TYPE_CHECKING:
        weight: Any

    def _find(self, ids: torch.Tensor, found: FoundRows | None) -> FoundRows | None:
        """Check ids, and return their rows if these are on servers. `found`: fetched before."""
        if found is not None:
            return found
        self.check_ids(ids)
        if not self._table.is_served:
            if self._table.keyed is None and not self._table.reads_half:
                return None
            return find_rows([ids], lambda keys: [self._read_here(keys[0])])[0]
        return self._find_served().find_rows([ids])[0]

    def _read_here(self, keys: torch.Tensor) -> torch.Tensor:
        """Return rows [n, dim] of this process as a step reads them."""
        kept = self._table.keyed
        if kept is None:
            rows = self.weight.detach()[keys.to(self.weight.device)]
        else:
            rows = kept.read(keys, NEWEST)
        return round_to_half(rows).float() if self._table.reads_half else rows

    def read_rows(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows [ids, dim], by default all, as the committed updates have left them.

        They are on the host, and have no gradient. All rows of a table of any keys are those of
        `read_keys`. UserError for an unknown id.
        """
        table = self._table
        if ids is None:
            ids = torch.arange(table.count) if table.rules is None else self.read_keys()
        ids = as_ids(table.name, ids)
        table.check(ids)
        if table.keyed is not None:
            return table.keyed.read(ids.cpu(), NEWEST)
        if not table.is_served:
            return self.weight.detach()[ids.to(self.weight.device)].cpu()
        return self._find_served().read_rows(table.shape, ids)

    @torch.no_grad()
    def write_rows(self, rows: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Give these rows [ids, dim], by default all, to the table: such as pretrained ones.

        What the optimizer keeps for them stays. Call it on all workers with the same rows, before
        the first step or after a step's batches. Rows on servers that are written elsewhere count
        as the next step begins. UserError for rows that do not fit, and a table of any keys.
        """
        table = self._table
        found = table.take_rows(rows, ids)
        if table.is_served:
            self._find_served().write_rows(table.shape, found, rows.detach())
            return
        self.weight[found.to(self.weight.device)] = rows.to(self.weight)

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse to make a table of rows alone, which would have no name. Raises UserError."""
        raise UserError(
            f"{cls.__name__}.from_pretrained(rows): tables of a job have names: make the table "
            "with name=..., then give it the rows: table.write_rows(rows)"
        )

    def read_keys(self) -> torch.Tensor:
        """Return the keys [n] that have rows now, in growing order. UserError if none can."""
        table = self._table
        if table.rules is None:
            raise UserError(f"table {table.name} has rows 0 to {table.count - 1}, and no keys")
        if table.keyed is not None:
            every = [find_keys(table.keyed, shard, NEWEST) for shard in range(SHARDS)]
            return torch.cat(every).sort().values
        return self._find_served().read_keys(table.shape)

    def _find_served(self) -> ServedOptimizer:
        assert isinstance(self._table.optimizer, ServedOptimizer)
        return self._table.optimizer

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise UserError for ids that the table lacks, or if a task looks them up untrained."""
        table = self._table
        check_lookup(table.name, self.weight, table.optimizer)
        table.check(ids)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "_table" in self.__dict__:
            raise UserError(
                f"table {self._table.name}: another weight was assigned, which the job would not "
                "update: give the rows to write_rows(rows)"
            )
        super().__setattr__(name, value)

    @contextmanager
    def _plain_weight(self) -> Iterator[None]:
        """Saves and loads, for torch, a table of any keys as one with an empty weight."""
        weight, is_keyed = self._parameters["weight"], self._table.rules is not None
        if is_keyed:
            self._parameters["weight"] = nn.Parameter(torch.empty(0, self._table.dim))
        try:
            yield
        finally:
            self._parameters["weight"] = weight

    def _save_to_state_dict(self, *args: Any) -> None:
        if not self._table.is_served:
            with self._plain_weight():
                super()._save_to_state_dict(*args)

    def _load_from_state_dict(
        self,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        *rest: list[str],
    ) -> None:
        """Take over rows, if there are any. The job's own state has none that are on servers."""
        table, key = self._table, f"{prefix}weight"
        if not table.is_served:
            with self._plain_weight():
                super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)
        elif key in state:
            self.write_rows(state[key])
        elif any(name.startswith(prefix) for name in state):
            table.take_rows(torch.empty(0, table.dim), torch.empty(0, dtype=torch.int64))
        elif strict and not self._find_served().is_connected:
            missing.append(key)
        if table.keyed is not None:
            table.keyed.forget_index()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any) -> Any:
        """Move the table, unless its rows have keys: these stay where they are.

        UserError for another type of numbers: all of a table's numbers are float32.
        """
        table, before = self._table, torch.empty(1, 1, device=self.weight.device)
        found = fn(before)
        if found.dtype != before.dtype:
            raise UserError(
                f"table {table.name}: its rows are float32 and cannot become {found.dtype}: "
                "convert the other modules, and what the table returns; with "
                "forward_precision='fp16' steps read rows as float16"
            )
        if not table.is_absent:
            return super()._apply(fn, *args)
        if table.rules is None:
            self.weight.move(empty_weight(table.count, table.dim, found.device))
        return self


class Embedding(_Rows, nn.Embedding):
    """Looks rows up, like torch.nn.Embedding; the job updates the rows by `optimizer`.

    `num_embeddings`, `embedding_dim`, `padding_idx`, `device`: as in torch. `name`: rows begin with
    values that follow from `seed`, this name and their ids. Two tables of one job need two names.
    `weight_init_min`, `weight_init_max`: limits of these values, by default sqrt(1 /
    num_embeddings) around 0. `seed`: by default torch.initial_seed(), which `holdfast.join` sets to
    the job's. `keys`: for num_embeddings=None, rows for any 64-bit ids. `forward_precision`: "fp16"
    if steps read rows rounded to float16, as which they then travel from servers: half the bytes,
    and each number off by up to 0.05 %. The rows themselves stay float32. Raises UserError.

        words = Embedding(1000, 8, name="words", optimizer=Adagrad(lr=0.1))
        job.protect(model=model, optimizer=optimizer, words=words)
        rows = words(torch.tensor([[3, 1], [4, 1]]))  # [2, 2, 8]
    """

    def __init__(  # tidy: allow constructor-size because these are torch's own arguments
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        name: str = "embedding",
        seed: int | None = None,
        optimizer: RowOptimizer | None = _DEFAULT,
        weight_init_min: float | None = None,
        weight_init_max: float | None = None,
        keys: KeyRules | None = None,
        forward_precision: str = FP32,
        device: Any = None,
    ) -> None:
        limits = (weight_init_min, weight_init_max)
        table = TableSpec(name, num_embeddings, embedding_dim, limits, keys)
        weight = table.make_weight(device)
        padding = padding_idx if keys is None else None
        nn.Embedding.__init__(self, table.count, table.dim, padding, sparse=True, _weight=weight)
        if table.is_absent:
            self.weight = table.replace_weight(weight)
        if keys is not None:
            self.padding_idx = padding_idx
        self._table = table
        table.reads_half = is_half(name, forward_precision)
        table.begin(self, seed, optimizer)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - as torch names it
        found: FoundRows | None = None,
    ) -> torch.Tensor:
        """Return the rows of the ids `input` [...] as [..., embedding_dim].

        UserError for an unknown id.

        `found`: what a collection has fetched for them.
        """
        ids = as_ids(self._table.name, input)
        found = self._find(ids, found)
        if found is None:
            return nn.Embedding.forward(self, ids)
        rows, padding = as_parameter_of(self.weight, found), found.find(self.padding_idx)
        return nn.functional.embedding(found.index, rows, padding, sparse=True)


class EmbeddingBag(_Rows, nn.EmbeddingBag):
    """Sums or averages rows, like torch.nn.EmbeddingBag; the job updates them by `optimizer`.

    `mode`: "sum" or "mean"; "max" has no sparse gradient. `include_last_offset`: as in torch. All
    else is as for Embedding. Raises UserError.

        items = EmbeddingBag(None, 8, name="items", keys=KeyRules(capacity=1000))
        job.protect(model=model, optimizer=optimizer, items=items)
        pooled = items(torch.tensor([3, 1, 4, 1]), torch.tensor([0, 3]))  # [2, 8]
    """

    def __init__(  # tidy: allow constructor-size because these are torch's own arguments
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str = "embedding",
        seed: int | None = None,
        optimizer: RowOptimizer | None = _DEFAULT,
        weight_init_min: float | None = None,
        weight_init_max: float | None = None,
        keys: KeyRules | None = None,
        forward_precision: str = FP32,
        device: Any = None,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise UserError(f"table {name}: mode={mode!r}: give 'sum' or 'mean'")
        limits = (weight_init_min, weight_init_max)
        table = TableSpec(name, num_embeddings, embedding_dim, limits, keys)
        weight = table.make_weight(device)
        nn.EmbeddingBag.__init__(
            self,
            table.count,
            table.dim,
            mode=mode,
            sparse=True,
            _weight=weight,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx if keys is None else None,
        )
        if table.is_absent:
            self.weight = table.replace_weight(weight)
        if keys is not None:
            self.padding_idx = padding_idx
        self._table = table
        table.reads_half = is_half(name, forward_precision)
        table.begin(self, seed, optimizer)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - as torch names it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        found: FoundRows | None = None,
    ) -> torch.Tensor:
        """Return a row for each bag: [bags, embedding_dim]. UserError for an unknown id.

        `found`: what a collection has fetched for these ids.
        """
        ids = as_ids(self._table.name, input)
        offsets = None if offsets is None else as_ids(self._table.name, offsets)
        found = self._find(ids, found)
        if found is None:
            return nn.EmbeddingBag.forward(self, ids, offsets, per_sample_weights)
        return nn.functional.embedding_bag(
            found.index,
            as_parameter_of(self.weight, found),
            offsets,
            mode=self.mode,
            sparse=True,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=found.find(self.padding_idx),
        )
