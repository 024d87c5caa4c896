"""Guards the promise in the script's code: its workers must be alike, its tasks pure.

In the first step after workers have joined, and in one step out of a cycle, it compares the plain
values of the state and samples of the dataset, and checks that no task writes to parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.engine.core.errors import ScriptFault, UserError
from holdfast.engine.core.ground.events import EventNoted
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.step.audits import EARLY_STEPS
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.data.sources import LoopData
from holdfast.engine.train.script.fingerprints import Fingerprints, PlainState, StateComparison
from holdfast.engine.train.script.repeated_tasks import (
    RepeatedTasks,
    RunMark,
    are_alike,
    is_machine_possible,
)
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.script.script_suspects import ScriptMemory, Suspects
from holdfast.engine.train.script.task_effects import ParameterWatch, TaskFiles
from holdfast.engine.train.script.unprotected_modules import UnprotectedModules
from holdfast.engine.train.step.driver import Driver, ScriptOrder
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.reduction import StepFingerprints

CHANGED = (
    "a task changes the attribute {path}, which is set back before the next task, so that no task "
    "depends on the ones before it; to keep a value, put it into a buffer (register_buffer) or "
    "into job.values"
)


@dataclass(slots=True, kw_only=True)
class ScriptGuard:
    """Guards one worker's script; see the module. `cycle`: steps; 0: no checks."""

    fingerprints: Fingerprints
    comparison: StateComparison
    repeats: RepeatedTasks
    attributes: ModuleAttributes
    loaded: LoadedState
    modules: list[tuple[str, torch.nn.Module]]
    parameters: ParameterWatch
    memory: ScriptMemory
    suspects: Suspects
    cycle: int
    #: It is called at the first step.
    look_once: Callable[[], None] | None = None
    files: TaskFiles | None = None
    # None: other scripts may own modules of this process.
    others: UnprotectedModules | None = None
    #: No agent watches this process.
    is_alone: bool = False
    #: Workers have joined before the next step.
    joined: bool = False
    #: Values of the script were remembered for the present task.
    has_marked: bool = False
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
    ) -> StepFingerprints:
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
        if looks and self.fingerprints.cycle:
            self.comparison.samples = {**data.facts, **data.samples(step)}
            plain = self.comparison.fingerprint_plain()
        every = self.fingerprints.take_all(buffers) if whole and self.fingerprints.cycle > 1 else 0
        part = self.fingerprints.take_part(step, buffers)
        return StepFingerprints(part, every, plain, copied)

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

        `spent_s`: how long they have taken. `compared`: other workers compute the task as well;
        then None means that the runs differ, and that they must find the cause. UserError, which
        names a parameter if tasks change one; WorldError.
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


def compose_guard(
    driver: Driver,
    spec: JobSpec,
    protected: Mapping[str, Any],
    progress: ScriptState,
    sharding: ShardedOptimizers | None = None,
    *,
    owns_process: bool,
    is_alone: bool,
) -> ScriptGuard:
    """Put together the parts that guard the promise in a worker's script.

    `owns_process`: all modules of this process belong to the script. `is_alone`: no agent watches
    this process.
    """
    silent = spec.silent_errors
    modules = [(n, o) for n, o in protected.items() if isinstance(o, torch.nn.Module)]

    def note(text: str) -> None:
        driver.post(EventNoted("script", text))

    def note_change(path: str) -> None:
        if driver.leads:
            note(CHANGED.format(path=path))

    torchs = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, ScriptState)
    own_objects = [o for o in protected.values() if not isinstance(o, torchs)]
    attributes = ModuleAttributes(modules, note_change)
    attributes.begin()
    progress.attributes = attributes
    _keep_settings(protected, progress)
    fingerprints = Fingerprints(protected, silent.fingerprint_steps, optimizers=sharding is None)
    cycle = silent.fingerprint_steps or silent.repeat_steps
    given = progress.values
    memory = ScriptMemory(lambda: _tensors_of(modules), lambda: {"job.values": dict(given)})
    suspects = Suspects(memory)

    def look_once() -> None:
        if not driver.leads:
            return
        if found := progress.settings.describe_changed():
            note(found)
        classes = {type(part) for _, each in modules for part in each.modules()}
        for found in suspects.describe_source(classes) if cycle else ():
            note(found)

    return ScriptGuard(
        fingerprints=fingerprints,
        comparison=StateComparison(PlainState(protected, attributes), fingerprints, memory.numbers),
        repeats=RepeatedTasks(
            silent.repeat_steps,
            spec.virtual_ranks,
            silent.audit_tolerance,
            note,
            lambda: _is_exact(modules),
            suspects.describe_repeated,
        ),
        memory=memory,
        suspects=suspects,
        look_once=look_once,
        attributes=attributes,
        loaded=LoadedState(protected, sharding),
        modules=modules,
        parameters=ParameterWatch(modules, cycle),
        files=TaskFiles(note) if cycle else None,
        cycle=cycle,
        others=UnprotectedModules(own_objects, progress.scratch) if owns_process else None,
        is_alone=is_alone,
    )


def _is_exact(modules: Sequence[tuple[str, torch.nn.Module]]) -> bool:
    """Return whether kernels of these modules give the same bits each time."""
    on_host = all(p.device.type == "cpu" for _, m in modules for p in m.parameters())
    if not on_host and torch.backends.cudnn.benchmark:
        return False  # each worker chooses kernels by their speed
    can_vary = current.probe.is_noisy or not on_host
    return torch.are_deterministic_algorithms_enabled() or not can_vary


def _keep_settings(protected: Mapping[str, Any], progress: ScriptState) -> None:
    """Keep the settings that the script has made, before a state is loaded."""
    made = {name: each for name, each in protected.items() if each is not progress}
    progress.settings.begin(PlainState(made, progress.attributes).items())


def _tensors_of(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[torch.Tensor]:
    for _, module in modules:
        yield from module.parameters()
        yield from module.buffers()
