"""Fingerprints the state, to compare it between workers: one part in each step.

They cover parameters, module buffers, the optimizers' state of each parameter, and the states of
virtual ranks. All workers take the same part in the same step, so that equal states have equal
fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.engine.train.checkpoint.local_tensors import local_of
from holdfast.engine.train.exchange.tensor_bytes import NUMPY_HAS, as_bytes, sum_of_bits
from holdfast.engine.train.script.rank_states import RankStates
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.step.absent_weight import AbsentWeight

CHUNK = 1 << 16  # elements of a tensor that are digested together
Chunk = tuple[torch.Tensor, int, int]


@dataclass(frozen=True, slots=True)
class FingerprintPlan:
    """Holds the covered tensors as they are between two steps: within one, FSDP2 has others there.

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

    def print_of_step(self, step: int, buffers: Sequence[torch.Tensor]) -> int:
        """Return 63 bits of this step's part; 0 if fingerprints are switched off."""
        if not self.cycle:
            return 0
        parts = self._plan(buffers).parts
        return (self._digest(parts[step % len(parts)]) if parts else 0) ^ self._print_of_ranks(step)

    def print_of_all(self, buffers: Sequence[torch.Tensor]) -> int:
        """Return 63 bits of the whole covered state; 0 if fingerprints are switched off."""
        if not self.cycle:
            return 0
        every = self._digest([chunk for part in self._plan(buffers).parts for chunk in part])
        return every ^ self._print_of_ranks()

    def prints_by_tensor(self, buffers: Sequence[torch.Tensor]) -> list[tuple[str, int]]:
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

    def _print_of_ranks(self, step: int | None = None) -> int:
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
                        yield value


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[Chunk]:
    for tensor in tensors:
        numel = local_of(tensor).numel()
        for start in range(0, numel, CHUNK):
            yield tensor, start, min(start + CHUNK, numel)
