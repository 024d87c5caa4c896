"""Keeps sparse gradients: the rows of a parameter that a task has used, and their partial sums.

A task's rows are added to those of other tasks along the canonical tree, row by row. So a row's sum
adds up its users in their canonical order, whoever computes them. Like buckets, these tables know
no workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.step.table_parameters import find_keyed_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Represents some rows of a parameter's gradient; all other rows are 0.

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
        places, values = _entries_of(grad, name)
        if grad.layout == torch.strided:
            return cls(places=places, values=values.contiguous(), dense=True)
        grad = grad.coalesce()
        return cls(places=grad.indices()[0].contiguous(), values=grad.values().contiguous())

    def add(self, other: Rows) -> Rows:
        """Return the sum, with the rows of both; this is the left operand."""
        if not len(other.places) or not len(self.places):
            return self if len(self.places) else other
        return self.merge(other)

    def merge(self, other: Rows) -> Rows:
        """Return the sum of parts of two sums that both have rows.

        A row that only the right operand has is added to zeros: -0.0 becomes 0.0 there.
        """
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
            return torch.zeros(tuple(param.shape), device=param.device)
        shape = tuple(param.shape)
        return torch.sparse_coo_tensor(
            self.places[None], self.values, shape, is_coalesced=True, check_invariants=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """Is one parameter of a table; `place`: its place in the model's own order.

    `start`: the number of its first row within the table.
    """

    name: str
    param: torch.nn.Parameter
    place: int
    start: int


class RowTable:
    """Keeps the rows of some parameters: partial sums of the present step, and the result.

    The rows of several parameters are numbered on, so that one operation handles all of them. These
    must have rows of one width, no keys, and an optimizer to which dense gradients may come as
    sparse ones.
    """

    def __init__(
        self,
        index: int,
        params: Sequence[tuple[str, torch.nn.Parameter, int]],
        owners: tuple[str, ...],
    ) -> None:
        """Number the rows of all parameters.

        `params`: names, parameters, and the parameters' places in the model's own order.
        """
        #: Its number, counted on after the buckets.
        self.index = index
        self.owners = owners
        self.parts: list[TablePart] = []
        self._rows = 0
        for name, param, place in params:
            part = TablePart(name=name, param=param, place=place, start=self._rows)
            self.parts.append(part)
            self._rows += len(param)
        self._keyed = find_keyed_gradient(self.parts[0].param)
        #: Places of parts with gradients of the running task.
        self.reached: set[int] = set()
        self.partials: dict[tree.Node, Rows] = {}
        self.result = self.make_rows()

    def make_rows(self, count: int = 0, *, dense: bool = False) -> Rows:
        """Return `count` rows without values yet."""
        return Rows.make_empty(self.parts[0].param, count, dense=dense)

    def begin_task(self) -> None:
        """Forget rows left over from a task whose pass was broken off."""
        self.reached.clear()
        if self._keyed is not None and self.parts[0].param.grad is None:
            self._keyed.take()

    def leaf(self) -> Rows:
        """Move the gradients now in `.grad` out of it; none counts as no rows."""
        grads = [(part, part.param.grad) for part in self.parts if part.param.grad is not None]
        for part in self.parts:
            part.param.grad = None
        if self._keyed is not None:
            found = self.make_rows()
            for keys, values in self._keyed.take():
                found = found.add(Rows(places=keys, values=values))
            return found
        if not grads:
            return self.make_rows()
        if len(self.parts) == 1:
            return Rows.of(grads[0][1], grads[0][0].name)
        return self._stack(grads)

    def split(self, rows: Rows) -> Iterator[tuple[TablePart, Rows]]:
        """Yield each parameter with its rows among these."""
        if len(self.parts) == 1:
            yield self.parts[0], rows
            return
        starts = torch.tensor([part.start for part in self.parts[1:]], device=rows.places.device)
        ends = torch.searchsorted(rows.places, starts).tolist()
        found = zip(rows.places.tensor_split(ends), rows.values.tensor_split(ends), strict=True)
        for part, (places, values) in zip(self.parts, found, strict=True):
            yield part, Rows(places=places - part.start, values=values)

    def contribute(self, vrank: int, leaf: Rows, vranks: int) -> None:
        tree.merge(self.partials, (vrank, 1), leaf, vranks, Rows.add)

    def reset(self) -> None:
        """Forget the step's partial sums."""
        self.partials.clear()
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Drop the gradient in `.grad`, also one left by a pass that failed."""
        for part in self.parts:
            part.param.grad = None
        if self._keyed is not None:
            self._keyed.take()

    def _stack(self, grads: Sequence[tuple[TablePart, torch.Tensor]]) -> Rows:
        """Return the rows of several parameters, by their numbers in the table."""
        parts = [(part, *_entries_of(grad, part.name)) for part, grad in grads]
        places = torch.cat([places + part.start for part, places, _ in parts])
        values = torch.cat([values for _, _, values in parts])
        shape = (self._rows, *values.shape[1:])
        whole = torch.sparse_coo_tensor(places[None], values, shape, check_invariants=False)
        return Rows.of(whole, self.parts[0].name)


def _entries_of(grad: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places [n] and values [n, *shape of a row] of a gradient. UserError.

    A row may be there several times; its gradient is the sum.
    """
    if grad.layout == torch.strided:
        return torch.arange(len(grad), device=grad.device), grad
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        raise UserError(
            f"parameter {name} has a gradient in the layout {grad.layout} that is sparse "
            "within rows: let it be dense, or sparse by rows, as that of an Embedding"
        )
    return grad._indices()[0], grad._values()
