"""Keeps sparse gradients: the rows of a parameter that a task has used, and their partial sums.

A task's rows are added to those of other tasks along the canonical tree, row by row. So a row's sum
adds up its users in their canonical order, whoever computes them. Like buckets, these tables know
nothing of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core import tree
from holdfast.core.errors import UserError
from holdfast.train.exchange.tensor_bytes import as_bytes
from holdfast.train.step.keyed_gradient import find_keyed_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Represents some rows of a parameter's gradient; the others are 0.

    `places`: [rows] int64, each once and in growing order: numbers of rows, or any keys. `values`:
    [rows, *shape of a row]. `dense`: one of the tasks had a dense gradient, so that all rows are
    here.
    """

    places: torch.Tensor
    values: torch.Tensor
    dense: bool = False

    @classmethod
    def make_empty(cls, param: torch.Tensor, count: int = 0, *, dense: bool = False) -> Rows:
        """Return `count` rows without values yet."""
        places = torch.empty(count, dtype=torch.int64, device=param.device)
        values = torch.empty(count, *param.shape[1:], dtype=param.dtype, device=param.device)
        return cls(places=places, values=values, dense=dense)

    @classmethod
    def of(cls, grad: torch.Tensor, name: str) -> Rows:
        """Return the rows of a gradient. UserError for one whose rows are sparse themselves."""
        if grad.layout == torch.strided:
            places = torch.arange(len(grad), device=grad.device)
            return cls(places=places, values=grad.contiguous(), dense=True)
        if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
            raise UserError(
                f"parameter {name} has a gradient in the layout {grad.layout} that is sparse "
                "within rows: let it be dense, or sparse by rows, as that of an Embedding"
            )
        grad = grad.coalesce()
        return cls(places=grad.indices()[0].contiguous(), values=grad.values().contiguous())

    def add(self, other: Rows) -> Rows:
        """Return the sum, with the rows of both; this is the left operand."""
        if not len(other.places) or not len(self.places):
            return self if len(self.places) else other
        both = torch.cat([self.places, other.places])
        places, index = torch.unique(both, sorted=True, return_inverse=True)
        left, right = index[: len(self.places)], index[len(self.places) :]
        values = self.values.new_zeros(len(places), *self.values.shape[1:])
        values[left] = self.values
        values[right] += other.values  # each row is in `right` once
        return Rows(places=places, values=values, dense=self.dense or other.dense)

    def copy(self) -> Rows:
        """Return them in memory of their own."""
        return Rows(places=self.places, values=self.values.clone(), dense=self.dense)

    def equals(self, other: Rows) -> bool:
        """Return whether both are equal, bit for bit."""
        return torch.equal(self.places, other.places) and torch.equal(
            as_bytes(self.values), as_bytes(other.values)
        )

    def times(self, scale: float, weight: float) -> Rows:
        """Return them multiplied by `scale` and divided by `weight`, where these are not 1."""
        values = self.values if scale == 1.0 else self.values * scale
        values = values if weight == 1.0 else values / weight
        return Rows(places=self.places, values=values, dense=self.dense)

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return the gradient to put into `.grad`."""
        if self.dense:
            return self.values
        keyed = find_keyed_gradient(param)
        if keyed is not None:
            keyed.take()
            keyed.add(self.places, self.values)
            return torch.zeros_like(param)
        shape = tuple(param.shape)
        return torch.sparse_coo_tensor(
            self.places[None], self.values, shape, is_coalesced=True, check_invariants=False
        )


class RowTable:
    """Keeps the rows of one parameter: partial sums of the present step, and the result."""

    def __init__(
        self, index: int, name: str, param: torch.nn.Parameter, place: int, owners: tuple[str, ...]
    ) -> None:
        self.index = index  # counted on after the buckets' indices
        self.name = name
        self.param = param
        self.place = place  # the parameter's place in the model's own order
        self.owners = owners
        self._keyed = find_keyed_gradient(param)
        self.partials: dict[tree.Node, Rows] = {}
        self.result = Rows.make_empty(param)

    def begin_task(self) -> None:
        """Forget rows left over from a task whose pass was broken off."""
        if self._keyed is not None and self.param.grad is None:
            self._keyed.take()

    def leaf(self) -> Rows:
        """Move the gradient now in `.grad` out of it; none counts as no rows."""
        grad, self.param.grad = self.param.grad, None
        if self._keyed is None:
            return Rows.make_empty(self.param) if grad is None else Rows.of(grad, self.name)
        found = Rows.make_empty(self.param)
        for keys, values in self._keyed.take():
            found = found.add(Rows(places=keys, values=values))
        return found

    def contribute(self, vrank: int, leaf: Rows, vranks: int) -> None:
        tree.merge(self.partials, (vrank, 1), leaf, vranks, Rows.add)

    def reset(self) -> None:
        """Forget the step's partial sums."""
        self.partials.clear()
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Drop the gradient in `.grad`, also one left by a pass that failed."""
        self.param.grad = None
        if self._keyed is not None:
            self._keyed.take()
