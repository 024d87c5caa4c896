"""Finds which parameters of the protected modules are trained, and notices when that changes.

A script may freeze, thaw, add, remove or replace parameters between two steps, on all workers
alike. The set of trained parameters is a part of the job's state: a worker that joins later has not
executed that line of the script, and takes the set over from the other workers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.engine.core.errors import StateMismatch, UserError

Named = tuple[str, nn.Parameter]
SHOWN = 3  # names in a message
# returns a module's children, parameters and buffers
_KEPT = operator.attrgetter("_modules", "_parameters", "_buffers")
_VALUES = operator.methodcaller("values")


class TrainedParameters:
    """Looks at the protected modules, by the names under which these are protected."""

    def __init__(self) -> None:
        self._modules: Mapping[str, nn.Module] = {}
        self._seen: dict[str, _Content] = {}
        self._gathers: list[Any] = []  # modules that have whole parameters while they compute
        self._planned: list[str] = []  # names of the parameters whose gradients are summed
        self._known: set[str] | None = None  # names in the first step, and later ones
        self._taken = False  # the names have come with the job's state

    def watch(self, modules: Mapping[str, nn.Module]) -> list[Named]:
        """Watch these modules from now on, but not averages; return the parameters to sum at first.

        UserError for modules that cannot be trained.
        """
        averages = torch.optim.swa_utils.AveragedModel
        self._modules = {n: m for n, m in modules.items() if not isinstance(m, averages)}
        every = [each for module in self._modules.values() for each in module.modules()]
        self._gathers = [each for each in every if hasattr(each, "set_requires_gradient_sync")]
        self._see(self._modules)
        return self._plan()

    @property
    def owners(self) -> list[str]:
        """Return the names under which modules with parameters are protected."""
        return [n for n, m in self._modules.items() if next(m.parameters(), None) is not None]

    def look(self, of: Collection[str] | None = None) -> list[Named] | None:
        """Return the parameters to sum from now on, if these modules, or any, have changed.

        Modules that a round does not name may be frozen in it for a while: that is no change.
        """
        self.scatter()
        if self._see(self._modules if of is None else of):
            self._see(self._modules)
            return self._plan()
        if self._taken:
            self._taken, every = False, dict(self._all_named())
            return [(name, every[name]) for name in self._planned if name in every]
        return None

    def find_new_names(self, *, looks: bool) -> list[str]:
        """Return the parameters and buffers that were added since the last call, by name.

        The first call, at the first step, returns none. `looks`: modules have changed since.
        """
        if self._known is not None and not looks:
            return []
        names = [name for name, _ in self._all_named()] + [
            f"{name}.{path}" for name, m in self._modules.items() for path, _ in m.named_buffers()
        ]
        known, self._known = self._known, {*names, *(self._known or ())}
        return [] if known is None else [name for name in names if name not in known]

    def scatter(self) -> None:
        """Free the whole parameters that modules of FSDP still have after a forward pass."""
        for each in self._gathers:
            each.reshard()

    def row_parameters(self) -> list[torch.Tensor]:
        """Return the parameters with sparse gradients."""
        every = [each for module in self._modules.values() for each in module.modules()]
        tables = [each for each in every if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
        return [each.weight for each in tables if each.sparse]

    def state_dict(self) -> dict[str, list[str] | None]:
        """Return the names of the trained parameters, and of the summed ones if these differ."""
        trained = self._trained_names()
        return {"now": trained, "planned": None if self._planned == trained else self._planned}

    def load_state_dict(self, state: Mapping[str, list[str] | None]) -> None:
        """Train the parameters that the job trains. StateMismatch if some are not here."""
        wanted, every = set(state["now"] or ()), dict(self._all_named())
        missing = sorted(wanted - set(every))
        if missing:
            raise StateMismatch(
                f"the job trains {', '.join(missing[:SHOWN])}, which this worker does not have: a "
                "worker that joins runs the script from its first line, so build all parameters "
                "before the first step, and freeze those that are trained later"
            )
        trained = {id(every[name]) for name in wanted}
        for param in every.values():
            if param.requires_grad != (id(param) in trained):
                param.requires_grad_(id(param) in trained)
                param.grad = None
        planned, self._taken = state["planned"], True
        self._planned = self._trained_names() if planned is None else list(planned)
        summed = {id(every[name]) for name in self._planned if name in every}
        for name, module in self._modules.items():
            parts = list(module.modules())
            self._seen[name] = _look_into(parts, lambda p: id(p) in summed)

    def _see(self, names: Collection[str]) -> bool:
        """Compare these modules with the last contents; return whether they have changed."""
        found = False
        for name, module in self._modules.items():
            if name in names:
                seen = self._seen.get(name)
                if seen is None or not _look_into(seen.modules).is_as(seen):
                    self._seen[name], found = _look_into(list(module.modules())), True
        return found

    def _plan(self) -> list[Named]:
        for name, module in self._modules.items():
            for path, each in module.named_modules(prefix=name):
                if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
                    raise UserError(
                        f"{path} has max_norm={each.max_norm}, with which a forward pass changes "
                        "the parameter: leave it out, and scale rows after the optimizer's step"
                    )
        every = self._all_named()
        for name, param in every:
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise UserError(f"{name} has no shape yet: call the model once, before any step")
            if param.requires_grad and param.is_floating_point() and param.itemsize == 1:
                kind = str(param.dtype).removeprefix("torch.")
                raise UserError(
                    f"{name} is trained in {kind}, in which gradients cannot be summed: keep it in "
                    f"float32 or bfloat16, and cast to {kind} in the forward pass"
                )
        self._planned = self._trained_names()
        return [(name, param) for name, param in every if param.requires_grad]

    def _trained_names(self) -> list[str]:
        return [name for name, param in self._all_named() if param.requires_grad]

    def _all_named(self) -> list[Named]:
        return [
            (f"{name}.{path}", param)
            for name, module in self._modules.items()
            for path, param in module.named_parameters(remove_duplicate=False)
        ]


@dataclass(frozen=True, slots=True)
class _Content:
    """Keeps modules' contents: objects, so that no identity is used again, and facts of them."""

    modules: list[nn.Module]
    #: The numbers of children, parameters and buffers of each.
    sizes: list[int]
    #: Their children and parameters.
    held: list[object]
    #: Whether each parameter is trained.
    trains: list[bool]
    #: Whether each buffer is None.
    empty: list[bool]

    def is_as(self, other: _Content) -> bool:
        """Return whether the same modules have the same contents, and train them alike."""
        return (
            self.sizes == other.sizes
            and all(map(operator.is_, self.held, other.held))
            and self.trains == other.trains
            and self.empty == other.empty
        )


def _look_into(
    modules: list[nn.Module],
    trains: Callable[[nn.Parameter], bool] = operator.attrgetter("requires_grad"),
) -> _Content:
    """Return the contents of each of these modules. It must be quick, as every step needs it."""
    kept: list[Mapping[str, Any]] = list(itertools.chain.from_iterable(map(_KEPT, modules)))
    children, params, buffers = (
        list(itertools.chain.from_iterable(map(_VALUES, filter(None, kept[kind::3]))))
        for kind in range(3)
    )
    return _Content(
        modules,
        list(map(len, kept)),
        children + params,
        [trains(each) for each in params if each is not None],
        [each is None for each in buffers],
    )
