"""Looks after the promise in what a script does: whether its workers are alike, its tasks pure.

In the first step after workers have joined, and in one step out of a cycle, it compares what is no
tensor of the state, and samples of the dataset, and sees that no task writes to parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.core.errors import UserError
from holdfast.train.checkpoint.loaded_state import LoadedState
from holdfast.train.data.sources import LoopData
from holdfast.train.script.fingerprints import Fingerprints
from holdfast.train.script.parameter_watch import ParameterWatch
from holdfast.train.script.plain_state import StateComparison
from holdfast.train.script.repeated_tasks import RepeatedTasks, RunMark
from holdfast.train.script.unprotected_modules import UnprotectedModules
from holdfast.train.step.module_attributes import ModuleAttributes
from holdfast.train.step.reduction import Prints

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
    parameters: ParameterWatch
    cycle: int
    others: UnprotectedModules | None = None  # None: modules of this process may be others'
    joined: bool = False  # workers have joined before the next step

    def open(
        self,
        step: int,
        buffers: Sequence[torch.Tensor],
        data: LoopData,
        *,
        whole: bool,
        copied: int = 0,
    ) -> Prints:
        """Begin a step; returns its fingerprints. `whole`: one is taken of all of the state.

        `copied`: the fingerprint of the copy for followers.
        """
        self.loaded.forget()
        looks = bool(self.cycle) and (self.joined or step % self.cycle == 0)
        self.attributes.begin_step(anew=looks)
        early = step < EARLY_STEPS
        if self.cycle:
            self.parameters.begin(step, whole=early or self.joined)
        self.joined = False
        if self.others is not None and self.cycle and (looks or early):
            self.others.look([module for _, module in self.modules])
        plain = 0
        if looks and self.prints.cycle:
            self.comparison.samples = data.samples(step)
            plain = self.comparison.plain_print()
        every = self.prints.of_all(buffers) if whole and self.prints.cycle > 1 else 0
        return self.prints.of_step(step, buffers), every, plain, copied

    def close(self) -> None:
        """End the tasks of a step. UserError if one of them has changed a parameter."""
        self.parameters.check()

    def decides(self, runs: Sequence[RunMark], task: str) -> bool:
        """Judge the runs of a repeated task; returns False if one more is needed.

        UserError, which names a parameter if tasks change one; WorldError.
        """
        try:
            return self.repeats.decides(runs, task)
        except UserError:
            self.parameters.check()
            raise
