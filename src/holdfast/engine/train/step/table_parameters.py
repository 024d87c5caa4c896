"""Stands for the parameters of tables where the numbers are not in them, and for their gradients.

The rows of a table may be on servers, or known by any 64-bit key. Training needs no more of its
weight than shape, device and gradient, so a function that reads or writes numbers of an absent
weight is refused. A sparse tensor of torch needs a size, and 2^64 rows are too many for it. So the
parameter is empty, with the width of the rows, and its gradient in torch is empty, too; the rows of
the gradient are collected in an attribute.

torch has no norm of a sparse tensor, and no sparse tensor of rows by any key. So functions of torch
that are given the summed gradient, between a step's batches and its optimizer, compute with the
rows in it: they clip, unscale and measure these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from holdfast.engine.core.errors import UserError

# functions and attributes of tensors that need no numbers
_ALLOWED = frozenset(
    "__hash__ __len__ _backward_hooks _base _grad _is_view _post_accumulate_grad_hooks "
    "_version data_ptr device dim dtype element_size get_device grad grad_fn is_complex "
    "is_contiguous is_cuda is_floating_point is_inference is_leaf is_meta is_quantized "
    "is_sparse itemsize layout names nbytes ndim ndimension nelement numel output_nr "
    "register_hook register_post_accumulate_grad_hook requires_grad requires_grad_ "
    "retains_grad shape size stride type".split()
)
ATTRIBUTE = "keyed_gradient"
# Functions and attributes of torch that are about the rows, the table, or the sparse form.
_OF_ROWS = frozenset(["values", "_values"])
_OF_TABLE = frozenset(["shape", "size"])
_OF_SPARSE = frozenset(
    ["coalesce", "indices", "_indices", "is_coalesced", "is_sparse", "layout", "to_dense"]
)


class AbsentWeight(nn.Parameter):
    """Is a parameter without numbers. `reason`: why it has none, and what to do instead."""

    reason: str

    @staticmethod
    def of(like: torch.Tensor, reason: str) -> AbsentWeight:
        """Return a parameter of this shape and device."""
        made = AbsentWeight(like)
        made.reason = reason
        return made

    def move(self, like: torch.Tensor) -> None:
        """Take over the device of a tensor of the same shape."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data, self.grad = like, None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        is_allowed = (
            owner if func.__name__ in ("__get__", "__set__") else func.__name__
        ) in _ALLOWED
        if not is_allowed:
            _refuse(owner or func.__name__, _find([*args, *(kwargs or {}).values()]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"AbsentWeight({list(self.shape)}: {self.reason})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", self)


def _find(values: Any) -> AbsentWeight | None:
    """Return the first such weight among arguments."""
    for each in values:
        if isinstance(each, AbsentWeight):
            return each
        found = _find(each) if isinstance(each, list | tuple) else None
        if found is not None:
            return found
    return None


def _refuse(name: str, weight: AbsentWeight | None) -> NoReturn:
    reason = "this table has no numbers in its weight" if weight is None else weight.reason
    raise UserError(f"{name} was called on the weight of a table: {reason}")


class KeyedGradient:
    """Collects the rows of one parameter's gradient that backward passes compute."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add rows [n, dim] of keys [n], each once and in growing order."""
        self._parts.append((keys, values))

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the added rows, and forget them."""
        taken, self._parts = self._parts, []
        return taken


def collect_keys(param: torch.Tensor) -> None:
    """Make a parameter without rows collect the rows of its gradient by key."""
    setattr(param, ATTRIBUTE, KeyedGradient())


def find_keyed_gradient(param: Any) -> KeyedGradient | None:
    """Return the collector of the rows of a parameter's gradient; None if it has none."""
    found: KeyedGradient | None = getattr(param, ATTRIBUTE, None)
    return found


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
