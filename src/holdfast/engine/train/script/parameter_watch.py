"""Finds parameters that tasks change in any way: a task may only read them.

PyTorch counts writes to a tensor, but not those through `data`, `set_` or NumPy, and a parameter
may be replaced. So three facts are compared: which tensor a name stands for, how often it was
written to, and its bytes. The bytes of all parameters are compared while a job or a member is new,
later a rotating share of them, so that watching costs next to nothing. Where only bytes differ,
memory may have failed, which does not happen twice in the same parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.step.early_audits import EARLY_STEPS
from holdfast.engine.train.checkpoint.local_tensors import local_of
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.engine.train.step.absent_weight import AbsentWeight

CHUNK_ELEMENTS = 1 << 14  # elements of one parameter that are compared in a step
SAMPLE_ELEMENTS = 64  # elements all over a parameter that are compared beside its chunk
_CURE = (
    " while tasks were computed (in forward or in the loop over batches, as a momentum encoder, an "
    "embedding with max_norm or an optimizer may do), so that the result depends on which worker "
    "computes what: change parameters after the loop over a step's batches only"
)


@dataclass(slots=True, kw_only=True)
class _Place:
    """Names a parameter of a module, with its tensor, version and digest before the tasks."""

    name: str
    home: dict[str, Any]  # the module's parameters
    key: str
    tensor: torch.nn.Parameter
    version: int = 0
    content: int | None = None  # a digest; None: not compared in this step


class ParameterWatch:
    """Compares the parameters of protected modules before and after the tasks of a step.

    `cycle`: the bytes of every parameter are compared once in this many steps.
    """

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]], cycle: int) -> None:
        self._modules = modules
        self._cycle = cycle
        self._places: list[_Place] = []
        self._odd: set[str] = set()  # parameters that have only changed their bytes
        self._step = 0
        self._is_whole = False
        self._is_open = False

    def begin(self, step: int, *, whole: bool) -> None:
        """Record the parameters before the tasks of a step; `whole`: every bit of them."""
        self._step, self._is_whole, self._is_open = step, whole, True
        if whole or not self._places or step % self._cycle == 0:
            self._places = _places(self._modules)
        turns = min(self._cycle, len(self._places))
        for i, each in enumerate(self._places):
            each.tensor = each.home[each.key]
            each.version = each.tensor._version
            looks = whole or i % turns == step % turns
            each.content = self._digest(each.tensor) if looks else None

    def check(self) -> None:
        """Raise UserError if a parameter has changed since `begin`; ends the step's watch."""
        if not self._is_open:
            return
        self._is_open = False
        for each in self._places:
            tensor = each.home.get(each.key)
            if tensor is None:
                raise UserError(f"parameter {each.name} was removed{_CURE}")
            if tensor is not each.tensor or tensor._version != each.version:
                raise UserError(f"parameter {each.name} was changed{_CURE}")
            if each.content is not None and self._digest(tensor) != each.content:
                if self._step < EARLY_STEPS or each.name in self._odd:
                    raise UserError(f"parameter {each.name} was changed{_CURE}")
                self._odd.add(each.name)  # other workers compare the state, and find a wrong one
        if self._is_whole:
            known = {each.name for each in self._places}
            for each in _places(self._modules):
                if each.name not in known:
                    raise UserError(f"parameter {each.name} was added{_CURE}")

    def _digest(self, tensor: torch.Tensor) -> int:
        """Return 64 bits of the contents, or of this step's share of them."""
        if isinstance(tensor, AbsentWeight):
            return 0
        held = local_of(tensor).detach()
        if held.layout != torch.strided:
            return 0
        if held.device.type == "cpu" and self._is_whole:
            return _print(held)
        flat = held.reshape(-1)
        chunks = max(1, -(-flat.numel() // CHUNK_ELEMENTS))
        start = self._step // self._cycle % chunks * CHUNK_ELEMENTS
        stride = max(1, flat.numel() // SAMPLE_ELEMENTS)
        return _print(flat[start : start + CHUNK_ELEMENTS]) ^ _print(flat[::stride])


def _places(modules: Sequence[tuple[str, torch.nn.Module]]) -> list[_Place]:
    """List all parameters except FSDP's, which are replaced while a module computes."""
    found: list[_Place] = []
    for name, module in modules:
        if any(_is_fsdp(each) for each in module.modules()):
            continue
        for path, each in module.named_modules(prefix=name):
            home = each._parameters
            found += [
                _Place(name=f"{path}.{key}", home=home, key=key, tensor=p)
                for key, p in home.items()
                if p is not None
            ]
    return found


def _is_fsdp(module: torch.nn.Module) -> bool:
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def _print(held: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(memory_of(held.cpu().contiguous()))
