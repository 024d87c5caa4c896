"""Guards the promise in the script's code: its workers must be alike, its tasks pure.

In the first step after workers have joined, and in one step out of a cycle, it compares the plain
values of the state and samples of the dataset, and checks that no task writes to parameters. It
also looks for modules that the script changes step by step and has not protected, such as averages
and targets.
"""

from __future__ import annotations

import gc
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.engine.core.errors import ScriptFault, UserError
from holdfast.engine.core.ground.events import EventNoted
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.step.audits import EARLY_STEPS
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.checkpoint.state import tensors_in
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
from holdfast.engine.train.step.driver import Driver, ScriptOrder
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.reduction import StepFingerprints
from holdfast.engine.train.step.table_parameters import AbsentWeight

TENSORS_MAX = 4  # tensors of a module that are compared
NUMBERS_MAX = 16  # numbers of each tensor that are compared
Numbers = tuple[str, ...]


class UnprotectedModules:
    """Watches the modules with parameters that are no part of the protected ones.

    A worker that joins would start them from scratch. In the first step it looks for every module
    of the process, and for every dictionary of tensors by the names of a module's parameters;
    frozen ones (teachers, feature extractors) do not change, and are not reported. Tensors in a
    protected object's state, or copies of them, are not reported either. Nor are objects in the
    job's scratch, because no result depends on these.

    `others`: protected objects that are no modules; tensors of their state are protected, too.
    `scratch`: the job's.
    """

    def __init__(
        self, others: Collection[Any] = (), scratch: Mapping[str, Any] | None = None
    ) -> None:
        self._others = others
        self._scratch: Mapping[str, Any] = {} if scratch is None else scratch
        self._found: list[tuple[weakref.ref[nn.Module], Numbers]] | None = None
        self._changed = 0  # how often in a row a module was seen to have changed
        # tables, their numbers, and how often in a row they changed
        self._tables: list[tuple[dict[str, Any], Numbers, int]] = []

    def look(self, protected: Collection[nn.Module]) -> None:
        """Compare the modules with their last contents. UserError if one has changed twice."""
        if self._found is None:
            kept = {t.data_ptr() for each in self._others for t in tensors_in(each.state_dict())}
            self._found = [
                (weakref.ref(m), _fingerprint(m)) for m in _unknown_modules(protected, kept)
            ]
            tables = _unknown_tables(protected, kept)
            self._tables = [(each, _numbers(each.values()), 0) for each in tables]
            return
        self._look_at_tables()
        now = [(ref, seen, ref()) for ref, seen in self._found]
        changed = [m for _, seen, m in now if m is not None and _fingerprint(m) != seen]
        if changed:
            own = _ids_inside(self._scratch)
            changed = [each for each in changed if id(each) not in own]
        if changed and self._changed:
            kept_now = self._contents()
            changed = [each for each in changed if not _is_among(each.parameters(), kept_now)]
        self._found = [(ref, _fingerprint(m)) for ref, _, m in now if m is not None]
        self._changed = self._changed + 1 if changed else 0
        if self._changed > 1:
            raise UserError(
                f"the script changes the parameters of a {type(changed[0]).__name__} that is not "
                "protected, so that a worker that joins would begin with a fresh one: name it in "
                "job.protect(...), as averages of weights and target networks must be; or put it "
                "into job.scratch if no result depends on it"
            )

    def _look_at_tables(self) -> None:
        """Keep watching only the tables that have changed; memory of the rest may be freed."""
        now = [(each, _numbers(each.values()), seen, n) for each, seen, n in self._tables]
        self._tables = [(each, found, n + 1) for each, found, seen, n in now if found != seen]
        if self._tables:
            own = _ids_inside(self._scratch)
            self._tables = [each for each in self._tables if id(each[0]) not in own]
        if any(times > 1 for *_, times in self._tables):
            kept = self._contents()
            self._tables = [
                (each, seen, 0 if _is_among(each.values(), kept) else times)
                for each, seen, times in self._tables
            ]
        for each, _, times in self._tables:
            if times > 1:
                raise UserError(
                    f"the script changes a dictionary of tensors with names of parameters "
                    f"({next(iter(each))}, ...), so that a worker that joins would begin "
                    "with fresh ones: keep such averages in a module (torch.optim.swa_utils."
                    "AveragedModel) that is named in job.protect(...), or, if no result depends on "
                    "them, in job.scratch"
                )

    def _contents(self) -> set[str]:
        """Return digests of the tensors in the protected objects' states, which may be copies."""
        tensors = (t for each in self._others for t in tensors_in(each.state_dict()))
        return {_describe_tensor(each) for each in tensors}


def _is_among(tensors: Iterable[torch.Tensor], contents: Collection[str]) -> bool:
    return all(_describe_tensor(each) in contents for each in tensors)


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {_numbers([tensor])}"


def _unknown_modules(protected: Collection[nn.Module], kept: Collection[int]) -> list[nn.Module]:
    """Return the outermost modules with parameters that are no part of a protected object.

    `kept`: addresses of further tensors that are protected.
    """
    inside = {id(each) for module in protected for each in module.modules()}
    known = {p.data_ptr() for module in protected for p in module.parameters()} | set(kept)
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(child) for each in every for child in each.children()}
    return [
        each
        for each in every
        if id(each) not in inside | parts and any(_is_unknown(p, known) for p in each.parameters())
    ]


def _is_unknown(parameter: torch.Tensor, known: Collection[int]) -> bool:
    return parameter.numel() > 0 and parameter.data_ptr() not in known


def _unknown_tables(
    protected: Collection[nn.Module], kept: Collection[int]
) -> list[dict[str, Any]]:
    """Return the dictionaries with a tensor of its own for each trained parameter of a module."""
    held = [each for m in protected for each in (*m.parameters(), *m.buffers())]
    known = {each.data_ptr() for each in held} | set(kept)
    names = [{n for n, p in m.named_parameters() if p.requires_grad} for m in protected]
    dicts = [each for each in gc.get_objects() if type(each) is dict]
    return [
        each
        for each in dicts
        if any(wanted and wanted <= each.keys() for wanted in names)
        and all(_is_free(value) and value.data_ptr() not in known for value in each.values())
    ]


def _ids_inside(scratch: Mapping[str, Any]) -> set[int]:
    """Return the ids of all objects in a script's scratch: items, and attributes of its objects."""
    found: set[int] = set()
    left: list[Any] = list(scratch.values())
    while left:
        each = left.pop()
        if id(each) in found or isinstance(each, type | types.ModuleType | types.FunctionType):
            continue
        found.add(id(each))
        if isinstance(each, dict | list | tuple):
            left += each.values() if isinstance(each, dict) else each
        elif not isinstance(each, torch.Tensor):
            left += getattr(each, "__dict__", {}).values()
    return found


def _is_free(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and value.numel() > 0


def _fingerprint(module: nn.Module) -> Numbers:
    return _numbers(module.parameters())


def _numbers(tensors: Iterable[torch.Tensor]) -> Numbers:
    """Return the first numbers of a few tensors; they show writes through `data`, too."""
    some = (each for each in tensors if each.numel() and not isinstance(each, AbsentWeight))
    few = itertools.islice(some, TENSORS_MAX)
    return tuple(repr(each.detach().flatten()[:NUMBERS_MAX].cpu().tolist()) for each in few)


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
