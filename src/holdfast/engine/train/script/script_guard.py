"""Guards the promise in the script's code: its workers must be alike, its tasks pure.

In the first step after workers have joined, and in one step out of a cycle, it compares the plain
values of the state and samples of the dataset, and checks that no task writes to parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.core.errors import ScriptFault, UserError
from holdfast.engine.core.step.early_audits import EARLY_STEPS
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.data.sources import LoopData
from holdfast.engine.train.script.fingerprints import Fingerprints
from holdfast.engine.train.script.parameter_watch import ParameterWatch
from holdfast.engine.train.script.plain_state import StateComparison
from holdfast.engine.train.script.repeated_tasks import (
    RepeatedTasks,
    RunMark,
    are_alike,
    is_machine_possible,
)
from holdfast.engine.train.script.script_memory import ScriptMemory
from holdfast.engine.train.script.script_suspects import Suspects
from holdfast.engine.train.script.unprotected_modules import UnprotectedModules
from holdfast.engine.train.step.driver import Driver, ScriptOrder
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.reduction import Prints
from holdfast.engine.train.step.task_files import TaskFiles


@dataclass(slots=True, kw_only=True)
class ScriptGuard:
    """Guards one worker's script; see the module. `cycle`: steps; 0: no checks."""

    prints: Fingerprints
    comparison: StateComparison
    repeats: RepeatedTasks
    attributes: ModuleAttributes
    loaded: LoadedState
    modules: list[tuple[str, torch.nn.Module]]
    parameters: ParameterWatch
    memory: ScriptMemory
    suspects: Suspects
    cycle: int
    look_once: Callable[[], None] | None = None  # called at the first step
    files: TaskFiles | None = None
    others: UnprotectedModules | None = None  # None: modules of this process may be others'
    is_alone: bool = False  # no agent watches this process
    joined: bool = False  # workers have joined before the next step
    has_marked: bool = False  # values of the script were remembered for the present task
    # set in the present step: why this worker contradicts itself
    accusation: UserError | None = None

    def open(
        self,
        step: int,
        buffers: Sequence[torch.Tensor],
        data: LoopData,
        *,
        whole: bool,
        first: bool = False,
        copied: int = 0,
    ) -> Prints:
        """Begin a step; return its fingerprints. `whole`: take one of the whole state.

        `first`: it is the first step of a loop. `copied`: the fingerprint of the copy for
        followers.
        """
        self.loaded.forget()
        if self.cycle:
            self.memory.begin()
        if self.look_once is not None:
            self.look_once()
            self.look_once = None
        looks = bool(self.cycle) and (first or self.joined or step % self.cycle == 0)
        self.attributes.begin_step(looks=looks)
        early = step < EARLY_STEPS
        if self.cycle:
            self.parameters.begin(step, whole=early or self.joined)
        self.joined, self.accusation = False, None
        if self.others is not None and self.cycle and (looks or early):
            self.others.look([module for _, module in self.modules])
        plain = 0
        if looks and self.prints.cycle:
            self.comparison.samples = {**data.facts, **data.samples(step)}
            plain = self.comparison.plain_print()
        every = self.prints.print_of_all(buffers) if whole and self.prints.cycle > 1 else 0
        return self.prints.print_of_step(step, buffers), every, plain, copied

    def close(self) -> None:
        """End the tasks of a step. UserError if one of them has changed a parameter."""
        self.parameters.check()

    @property
    def is_exact(self) -> bool:
        """Return whether a task has the same bits each time on a sound machine."""
        return self.repeats.is_exact

    def begin_runs(self) -> None:
        """Prepare to compute a task several times, because workers disagree."""
        self.memory.mark()

    def next_order(self, driver: Driver, within_s: float = float("inf")) -> ScriptOrder | None:
        """Wait for the script's next order; None if none comes within that time.

        UserError names suspects in the script.
        """
        try:
            return driver.next_for_script(within_s)
        except ScriptFault as fault:
            raise self._name_suspects(fault) from None

    def _name_suspects(self, fault: ScriptFault) -> UserError:
        """Return the error that ends the job, with suspects in the script.

        UserError at once, which names a parameter, if tasks change one.
        """
        self.parameters.check()
        return self.accusation or UserError(f"{fault}{self.suspects.describe_steady()}")

    def judge_runs(
        self, runs: Sequence[RunMark], task: str, *, spent_s: float, compared: bool
    ) -> bool | None:
        """Judge the runs of a repeated task; return False if another run is needed.

        `spent_s`: how long they have taken. `compared`: others compute the task as well; then None
        means that the runs differ, and that others must find the cause. UserError, which names a
        parameter if tasks change one; WorldError.
        """
        if not (are_alike(runs) or self.has_marked):
            self.memory.mark()
        self.has_marked = not are_alike(runs)
        try:
            return self.repeats.judge_runs(runs, task, spent_s)
        except UserError as error:
            self.parameters.check()
            by_script = self.repeats.is_made_at_first(runs) or not is_machine_possible(runs)
            if by_script or not (compared and self.is_exact):
                raise
            self.accusation = error
            return None

    def contradicts_itself(self, runs: Sequence[RunMark], task: str) -> bool:
        """Return whether the runs of a disputed task differ; if so, remember the reason."""
        if are_alike(runs):
            return False
        self.accusation = self.accusation or self.repeats.accuse(runs, task)
        return True
