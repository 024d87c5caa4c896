"""Describes a worker's state to the others: plain values as texts, tensors as fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from holdfast.engine.train.script.fingerprints import Fingerprints
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.step.module_attributes import ModuleAttributes

TEXT_CHARS_MAX = 200  # longer values are cut


class PlainState:
    """Collects the parts of the job's state that are not tensors, by paths for people."""

    def __init__(self, protected: Mapping[str, Any], attributes: ModuleAttributes) -> None:
        self._protected = protected
        self._attributes = attributes

    def items(self) -> dict[str, str]:
        """Return the text of every value, by its path."""
        found = {path: _text(value) for path, value in self._attributes.plain_attributes().items()}
        for name, each in self._protected.items():
            if isinstance(each, torch.nn.Module):
                frozen = [key for key, p in each.named_parameters() if not p.requires_grad]
                found[f"the frozen parameters of {name}"] = ", ".join(frozen)
            elif isinstance(each, torch.optim.Optimizer):
                for i, group in enumerate(each.param_groups):
                    kept = {key: value for key, value in group.items() if key != "params"}
                    found.update(_leaves(kept, f"{name}.param_groups[{i}]"))
            elif isinstance(each, ScriptState):
                each.values.check()
                found.update(_leaves(dict(each.values), "job.values"))
                found["the number of steps taken"] = str(each.steps)
            else:
                found.update(_leaves(each.state_dict(), name))
        return found


class StateComparison:
    """Describes this worker's state to others, in words of bounded size."""

    def __init__(
        self,
        plain: PlainState,
        prints: Fingerprints,
        numbers: Callable[[], list[tuple[str, str, bool]]] = list,
    ) -> None:
        self._plain = plain
        self._prints = prints
        self._numbers = numbers  # the script's own, which belong to no state
        self.samples: dict[str, str] = {}  # digests of samples that all workers have read

    def plain_print(self) -> int:
        """Return a digest of 63 bits of the parts that are not tensors; never 0."""
        text = msgspec.msgpack.encode({**self._plain.items(), **self.samples})
        return xxhash.xxh3_64_intdigest(text) >> 1 or 1

    def describe(self, buffers: Sequence[torch.Tensor]) -> bytes:
        """Return a description with which others find the differences."""
        tensors = self._prints.prints_by_tensor(buffers) if self._prints.cycle else []
        plain = {**self._plain.items(), **self.samples}
        found = list(plain.items()), tensors, self._numbers(), self._prints.trained_modules()
        return msgspec.msgpack.encode(found)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    match value:
        case dict():
            for key, each in value.items():
                yield from _leaves(each, f"{path}[{key!r}]")
        case list() | tuple():
            for i, each in enumerate(value):
                yield from _leaves(each, f"{path}[{i}]")
        case torch.Tensor() if value.numel() != 1:
            return
        case torch.Tensor():
            yield path, _text(value.item())
        case np.generic():
            yield path, _text(value)
        case None | bool() | int() | float() | str() | bytes():
            yield path, _text(value)


def _text(value: Any) -> str:
    text = repr(value)
    if len(text) <= TEXT_CHARS_MAX:
        return text
    return f"{text[:TEXT_CHARS_MAX]}... ({xxhash.xxh3_64_hexdigest(text.encode())})"
