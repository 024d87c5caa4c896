"""Offers a table's summed gradient to the script, between a step's batches and its optimizer.

torch has no norm of a sparse tensor, and no sparse tensor of rows by any key. So functions of torch
that are given this gradient compute with the rows in it: they clip, unscale and measure these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from holdfast.engine.train.step.keyed_gradient import find_keyed_gradient

# Functions and attributes of torch that are about the rows, the table, or the sparse form.
_OF_ROWS = frozenset(["values", "_values"])
_OF_TABLE = frozenset(["shape", "size"])
_OF_SPARSE = frozenset(
    ["coalesce", "indices", "_indices", "is_coalesced", "is_sparse", "layout", "to_dense"]
)


class RowGradient(torch.Tensor):
    """Is the gradient of a table: `values` [n, dim] are its rows at `places` [n], each once.

    It has the shape of the table, as torch wants it. The other rows are 0.
    """

    places: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(param: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient in a parameter's `.grad` in this form; None: it has none.

        A gradient with all rows is returned as it is.
        """
        grad, keyed = param.grad, find_keyed_gradient(param)
        if grad is None or isinstance(grad, RowGradient):
            return grad
        if grad.layout == torch.strided and keyed is None:
            return grad
        if keyed is not None:
            none = (torch.empty(0, dtype=torch.int64), torch.empty(0, param.shape[1]))
            places, rows = next(iter(keyed.take()), none)
        else:
            grad = grad.coalesce()
            places, rows = grad.indices()[0], grad.values()
        make: Any = torch.Tensor._make_wrapper_subclass
        found: RowGradient = make(RowGradient, param.shape, dtype=rows.dtype, device=param.device)
        found.places, found.rows = places, rows
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        names = {getattr(getattr(func, "__self__", None), "__name__", ""), func.__name__}
        mine = next((each for each in args if isinstance(each, RowGradient)), None)
        if mine is not None and names & _OF_ROWS:
            return mine.rows
        if names & _OF_TABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        pick = _as_sparse if names & _OF_SPARSE else _rows_of
        given = {key: _replace(value, pick) for key, value in (kwargs or {}).items()}
        return func(*_replace(args, pick), **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotImplementedError(f"{func} of a table's gradient: use its values()")


def _rows_of(grad: RowGradient) -> torch.Tensor:
    return grad.rows


def _as_sparse(grad: RowGradient) -> torch.Tensor:
    shape = tuple(grad.shape)
    if not shape[0]:  # the table has rows for any keys
        return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), grad.rows[:0], shape)
    return torch.sparse_coo_tensor(
        grad.places[None], grad.rows, shape, is_coalesced=True, check_invariants=False
    )


def _replace(value: Any, pick: Callable[[RowGradient], torch.Tensor]) -> Any:
    """Return arguments with another tensor in the place of each such gradient."""
    if isinstance(value, RowGradient):
        return pick(value)
    if isinstance(value, list | tuple):
        return type(value)(_replace(each, pick) for each in value)
    return value
