"""Looks after the promise in what a script does: whether its workers are alike, its tasks pure.

In the first step after workers have joined, and in one step out of a cycle, it compares what is no
tensor of the state, and samples of the dataset, and sees that no task writes to parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from holdfast.core.errors import UserError
from holdfast.train.checkpoint.loaded_state import LoadedState
from holdfast.train.data.sources import LoopData
from holdfast.train.repeated_tasks import RepeatedTasks
from holdfast.train.step.fingerprints import Fingerprints
from holdfast.train.step.module_attributes import ModuleAttributes
from holdfast.train.step.reduction import Prints
from holdfast.train.step.state_differences import StateComparison
from holdfast.train.unprotected_modules import UnprotectedModules

EARLY_STEPS = 4  # of the job, in which a little more is looked at


@dataclass(slots=True, kw_only=True)
class ScriptGuard:
    """Guards one worker's script; see the module. `cycle`: steps; 0: nothing is looked at."""

    prints: Fingerprints
    comparison: StateComparison
    repeats: RepeatedTasks
    attributes: ModuleAttributes
    loaded: LoadedState
    modules: list[tuple[str, torch.nn.Module]]
    cycle: int
    others: UnprotectedModules | None = None  # None: modules of this process may be others'
    joined: bool = False  # workers have joined before the next step
    _versions: dict[str, int] = field(default_factory=dict)  # of the parameters, if looked at

    def open(
        self, step: int, buffers: Sequence[torch.Tensor], data: LoopData, *, whole: bool
    ) -> Prints:
        """Begin a step; returns its fingerprints. `whole`: one is taken of all of the state."""
        self.loaded.forget()
        looks = bool(self.cycle) and (self.joined or step % self.cycle == 0)
        self.attributes.begin_step(anew=looks)
        self.joined = False
        self._versions = self._written() if looks else {}
        if self.others is not None and self.cycle and (looks or step < EARLY_STEPS):
            self.others.look([module for _, module in self.modules])
        plain = 0
        if looks and self.prints.cycle:
            self.comparison.samples = data.samples(step)
            plain = self.comparison.plain_print()
        every = self.prints.of_all(buffers) if whole and self.prints.cycle > 1 else 0
        return self.prints.of_step(step, buffers), every, plain

    def close(self) -> None:
        """End the tasks of a step. UserError if one of them has written to a parameter."""
        if not self._versions:
            return
        for name, version in self._written().items():
            if version != self._versions.get(name, version):
                raise UserError(
                    f"parameter {name} was changed while tasks were computed (in forward, as "
                    "embeddings with max_norm do, or by an optimizer within the loop over batches):"
                    " change parameters after the loop over a step's batches only"
                )

    def _written(self) -> dict[str, int]:
        """Return how often each parameter has been written to."""
        return {f"{n}.{k}": p._version for n, m in self.modules for k, p in m.named_parameters()}
