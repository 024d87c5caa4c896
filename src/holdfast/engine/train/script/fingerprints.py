"""Fingerprints the state, to compare it between workers: one part in each step.

Fingerprints cover parameters, module buffers, the optimizers' state of each parameter, and the
states of virtual ranks. All workers take the same part in the same step, so that equal states have
equal fingerprints. A worker whose state differs describes it to the other workers: plain values as
texts, tensors as fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from holdfast.engine.train.checkpoint.local_tensors import check_is_plain, local_of
from holdfast.engine.train.exchange.tensor_bytes import NUMPY_HAS, as_bytes, sum_of_bits
from holdfast.engine.train.script.rank_states import RankStates
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.table_parameters import AbsentWeight

CHUNK = 1 << 16  # elements of a tensor that are digested together
Chunk = tuple[torch.Tensor, int, int]
TEXT_CHARS_MAX = 200  # longer values are cut


@dataclass(frozen=True, slots=True)
class FingerprintPlan:
    """Holds the covered tensors between two steps: within a step, FSDP2 has other ones there.

    `buffers`: the number of the modules' buffers for which `parts` were cut.
    """

    buffers: int
    parameters: list[tuple[str, torch.Tensor]]
    parts: list[list[Chunk]]


class Fingerprints:
    """Digests parts of the protected state, which must be the same on all workers.

    `cycle`: steps in which all of the state is covered once; 0: none of it ever is.

    `buffers`: those of the modules as they were at the step's beginning. `optimizers`: their state
    is covered, too.
    """

    def __init__(
        self, protected: Mapping[str, Any], cycle: int, *, optimizers: bool = True
    ) -> None:
        self.cycle = cycle
        self._optimizers = optimizers
        self.protected = protected
        self._found: FingerprintPlan | None = None

    def take_part(self, step: int, buffers: Sequence[torch.Tensor]) -> int:
        """Return 63 bits of this step's part; 0 if fingerprints are switched off."""
        if not self.cycle:
            return 0
        parts = self._plan(buffers).parts
        return (self._digest(parts[step % len(parts)]) if parts else 0) ^ self._take_ranks(step)

    def take_all(self, buffers: Sequence[torch.Tensor]) -> int:
        """Return 63 bits of the whole covered state; 0 if fingerprints are switched off."""
        if not self.cycle:
            return 0
        every = self._digest([chunk for part in self._plan(buffers).parts for chunk in part])
        return every ^ self._take_ranks()

    def take_each(self, buffers: Sequence[torch.Tensor]) -> list[tuple[str, int]]:
        """Return the name of each tensor of the state that is covered, with 63 bits of it."""
        kept = [f"{n}.{key}" for n, m in self._modules() for key, _ in m.named_buffers()]
        if len(kept) != len(buffers):  # two modules share a buffer
            kept = ["a buffer"] * len(buffers)
        every = [*self._plan(buffers).parameters, *zip(kept, buffers, strict=True)]
        found = [(name, self._digest(list(_chunks([tensor])))) for name, tensor in every]
        return found + [each for held in self._rank_states() for each in held.describe_states()]

    def trained_modules(self) -> list[str]:
        """Return the names of the protected modules with parameters that an optimizer updates."""
        optimizers = [o for o in self.protected.values() if isinstance(o, torch.optim.Optimizer)]
        updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        return [n for n, m in self._modules() if any(id(p) in updated for p in m.parameters())]

    def forget(self) -> None:
        """Find the covered tensors again, since the modules have changed."""
        self._found = None

    def _plan(self, buffers: Sequence[torch.Tensor]) -> FingerprintPlan:
        """Cut the state into parts of about equal size, one for each step of a cycle."""
        # there are no buffers before the first step
        if self._found is None or self._found.buffers != len(buffers):
            parameters = self._parameters()
            chunks = list(_chunks([*(tensor for _, tensor in parameters), *buffers]))
            total = sum((stop - start) * tensor.element_size() for tensor, start, stop in chunks)
            count = min(self.cycle, len(chunks))
            parts: list[list[Chunk]] = [[] for _ in range(count)]
            at = 0
            for tensor, start, stop in chunks:
                parts[min(at * count // max(total, 1), count - 1)].append((tensor, start, stop))
                at += (stop - start) * tensor.element_size()
            self._found = FingerprintPlan(
                len(buffers), parameters, [part for part in parts if part]
            )
        return self._found

    def _rank_states(self) -> list[RankStates]:
        every = self.protected.values()
        return [each.rank_states for each in every if isinstance(each, ScriptState)]

    def _take_ranks(self, step: int | None = None) -> int:
        """Return 63 bits of the states of virtual ranks, or only of those due in this step."""
        return sum(each.fingerprint(step) for each in self._rank_states())

    def _modules(self) -> list[tuple[str, torch.nn.Module]]:
        return [(n, m) for n, m in self.protected.items() if isinstance(m, torch.nn.Module)]

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        """List the modules' and the optimizers' parameters, each once, with their names."""
        modules = self._modules()
        named = {id(p): f"{n}.{key}" for n, m in modules for key, p in m.named_parameters()}
        found: dict[int, torch.Tensor] = {}
        for each in self.protected.values():
            if isinstance(each, torch.nn.Module):
                found.update((id(p), p) for p in each.parameters())
            elif isinstance(each, torch.optim.Optimizer):
                groups = each.param_groups
                found.update((id(p), p) for group in groups for p in group["params"])
        other = "a parameter of an optimizer"
        return [
            (named.get(i, other), p)
            for i, p in found.items()
            if p.layout == torch.strided and not isinstance(p, AbsentWeight)
        ]

    def _digest(self, chunks: Sequence[Chunk]) -> int:
        digest = xxhash.xxh3_64()
        sums: list[torch.Tensor] = []
        for tensor, start, stop in chunks:
            held = local_of(tensor)
            for each in (held, *map(local_of, self._states_of(tensor))):
                numel = each.numel()
                alike = numel == held.numel()
                if not alike and start > 0:
                    continue
                part = each.detach()
                if alike and stop - start < numel:
                    part = part.reshape(-1)[start:stop]
                if part.is_cuda:
                    sums.append(sum_of_bits(part.reshape(-1)))
                elif part.dtype in NUMPY_HAS and part.is_contiguous():
                    digest.update(part.numpy().data)  # the same bytes, with a tenth of the calls
                else:
                    digest.update(as_bytes(part).numpy().data)
        if sums:  # one transfer for all of them
            gathered = torch.stack([each.to(sums[0].device) for each in sums])
            digest.update(as_bytes(gathered).numpy().data)
        return digest.intdigest() >> 1

    def _states_of(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        for each in self.protected.values() if self._optimizers else ():
            if isinstance(each, torch.optim.Optimizer) and parameter in each.state:
                kept = each.state[parameter]
                for name in sorted(kept, key=str):
                    value = kept[name]
                    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                        check_is_plain(f"{name} of an optimizer", value)
                        yield value


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[Chunk]:
    for tensor in tensors:
        numel = local_of(tensor).numel()
        for start in range(0, numel, CHUNK):
            yield tensor, start, min(start + CHUNK, numel)


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
    """Describes this worker's state to other workers, in words of bounded size."""

    def __init__(
        self,
        plain: PlainState,
        fingerprints: Fingerprints,
        numbers: Callable[[], list[tuple[str, str, bool]]] = list,
    ) -> None:
        self._plain = plain
        self._fingerprints = fingerprints
        self._numbers = numbers  # the script's own, which belong to no state
        #: Digests of samples that all workers have read.
        self.samples: dict[str, str] = {}

    def fingerprint_plain(self) -> int:
        """Return a digest of 63 bits of the parts that are not tensors; never 0."""
        text = msgspec.msgpack.encode({**self._plain.items(), **self.samples})
        return xxhash.xxh3_64_intdigest(text) >> 1 or 1

    def describe(self, buffers: Sequence[torch.Tensor]) -> bytes:
        """Return a description by which other workers find the differences."""
        tensors = self._fingerprints.take_each(buffers) if self._fingerprints.cycle else []
        plain = {**self._plain.items(), **self.samples}
        found = list(plain.items()), tensors, self._numbers(), self._fingerprints.trained_modules()
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
