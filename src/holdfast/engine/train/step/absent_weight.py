"""Stands for a table's weight where the rows are not in it: on servers, or known by any key.

Training needs no more than its shape, device and gradient. A function that reads or writes its
numbers is refused, because there are none.
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
