"""Tables for scripts, with the arguments and the semantics of torch's Embedding and EmbeddingBag.

Their gradients are sparse, and the job updates the used rows itself as a step is committed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import UserError
from holdfast.servers.row_optimizers import SGD, RowOptimizer, TableOptimizer
from holdfast.servers.row_values import fill_rows, seed_of_table

_DEFAULT = SGD()


class TableSpec:
    """Describes a table: `count` rows of `dim` numbers, first drawn uniformly from `limits`.

    Raises UserError for sizes and limits that no table can have.
    """

    def __init__(
        self, name: str, count: int | None, dim: int, limits: tuple[float | None, float | None]
    ) -> None:
        if count is None:
            raise UserError(
                f"table {name}: num_embeddings=None, a table of any keys, is not there yet: give "
                "the number of rows"
            )
        if count < 1 or dim < 1:
            sizes = f"num_embeddings={count}, embedding_dim={dim}"
            raise UserError(f"table {name}: {sizes}: both must be 1 or more")
        usual = math.sqrt(1 / count)
        low = -usual if limits[0] is None else limits[0]
        high = usual if limits[1] is None else limits[1]
        if not low <= high:
            raise UserError(f"table {name}: its first values are from {low} to {high}: swap these")
        self.name, self.count, self.dim, self.limits = name, count, dim, (low, high)

    def begin(
        self, table: Embedding | EmbeddingBag, seed: int | None, rule: RowOptimizer | None
    ) -> None:
        """Give all rows their first values, 0 for padding, and the table its own optimizer.

        `rule`: None if the optimizer of a collection updates the rows.
        """
        found = torch.initial_seed() if seed is None else seed
        with torch.no_grad():
            fill_rows(table.weight, 0, seed_of_table(found, self.name), *self.limits)
            if table.padding_idx is not None:
                table.weight[table.padding_idx].zero_()
        if rule is not None:
            table.row_optimizer = TableOptimizer([table.weight], rule)

    def check(self, ids: torch.Tensor) -> None:
        """Raise UserError for ids that the table does not have. Ids on a GPU are not looked at."""
        if ids.device.type != "cpu" or not ids.numel():
            return
        least, most = (int(each) for each in torch.aminmax(ids))
        if least < 0:
            raise UserError(f"table {self.name}: id {least} is negative: ids are 0 or more")
        if most >= self.count:
            raise UserError(
                f"table {self.name}: id {most} is beyond its num_embeddings={self.count}: give "
                "the table more rows, or take ids modulo that number"
            )


class Embedding(nn.Embedding):
    """Looks rows up, like torch.nn.Embedding; the job updates the rows by `optimizer`.

    `name`: rows begin with values that follow from `seed`, this name and their ids. Two tables of
    one job need two names. `seed`: by default torch.initial_seed(), which `holdfast.join` sets to
    the job's. Raises UserError.
    """

    row_optimizer: TableOptimizer

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
        device: Any = None,
    ) -> None:
        limits = (weight_init_min, weight_init_max)
        table = TableSpec(name, num_embeddings, embedding_dim, limits)
        weight = torch.empty(table.count, table.dim, device=device)
        super().__init__(table.count, table.dim, padding_idx, sparse=True, _weight=weight)
        table.begin(self, seed, optimizer)
        self._table = table

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the rows of ids [...] as [..., embedding_dim]. UserError for an unknown id."""
        self._table.check(input)
        return super().forward(input)


class EmbeddingBag(nn.EmbeddingBag):
    """Sums or averages rows, like torch.nn.EmbeddingBag; the job updates them by `optimizer`.

    `name`, `seed`: as for Embedding. `mode`: "sum" or "mean"; "max" has no sparse gradient. Raises
    UserError.
    """

    row_optimizer: TableOptimizer

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
        device: Any = None,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise UserError(f"table {name}: mode={mode!r}: give 'sum' or 'mean'")
        limits = (weight_init_min, weight_init_max)
        table = TableSpec(name, num_embeddings, embedding_dim, limits)
        super().__init__(
            table.count,
            table.dim,
            mode=mode,
            sparse=True,
            _weight=torch.empty(table.count, table.dim, device=device),
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
        table.begin(self, seed, optimizer)
        self._table = table

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - as torch names it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a row for each bag: [bags, embedding_dim]. UserError for an unknown id."""
        self._table.check(input)
        return super().forward(input, offsets, per_sample_weights)
