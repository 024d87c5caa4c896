"""Updates the tables of a job whose rows no optimizer of the script updates.

Such a module has an attribute `row_optimizer`, a torch optimizer. It becomes a part of the job's
state together with its module, and takes its step when the script calls the optimizer of its other
parameters, which may clip the committed gradients before. Must not know what a table is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.step.table_parameters import RowGradient, find_keyed_gradient

ATTRIBUTE = "row_optimizer"
NOT_UPDATED = (
    "the script has called no optimizer in step {step}, so rows of tables were not updated either: "
    "their gradients of such a step are dropped, like those of other parameters"
)

T = TypeVar("T")


class RowUpdates:
    """Knows the optimizers of the protected modules' rows, by the names of these modules.

    The rows that a step has used are updated when the script calls an optimizer's step(), as other
    parameters are, or after the step if the job protects no other optimizer.
    """

    def __init__(self) -> None:
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        # Names of trained tables, with the name of the optimizer of each.
        self._names: dict[str, str] = {}
        self._others: dict[str, Any] = {}  # protected objects that are no modules
        # Optimizers with committed gradients that have not been applied yet.
        self._waiting: list[torch.optim.Optimizer] = []
        self._has_dropped = False  # gradients, because the script has called no optimizer

    def find(self, name: str, value: Any) -> dict[str, torch.optim.Optimizer]:
        """Return new optimizers within an object that is protected as `name`, by their names."""
        if not isinstance(value, nn.Module):
            self._others[name] = value
            return {}
        found = {}
        for path, module in value.named_modules(prefix=name):
            optimizer = getattr(module, ATTRIBUTE, None)
            known = any(optimizer is each for each in self._optimizers.values())
            if isinstance(optimizer, torch.optim.Optimizer) and not known:
                found[f"{path}.{ATTRIBUTE}"] = optimizer
        self._optimizers |= found
        if not isinstance(value, torch.optim.swa_utils.AveragedModel):
            self._check_names(found)
        return found

    def _check_names(self, found: dict[str, torch.optim.Optimizer]) -> None:
        """Raise UserError if two tables that are trained have one name. `found`: the new ones."""
        for path, optimizer in found.items():
            for name in _trained_tables(optimizer):
                other = self._names.setdefault(name, path)
                if other != path:
                    named = " and ".join(
                        each.removesuffix(f".{ATTRIBUTE}") for each in (other, path)
                    )
                    raise UserError(
                        f"two tables have the name {name!r}, in {named}: give each a name of its "
                        "own (name=...), by which its rows are known; freeze a copy that is not "
                        "trained (requires_grad_(False)) before it is protected"
                    )

    def group(self, params: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Sort parameters with sparse gradients into lists; each list can be summed as one table.

        The parameters of a list have one optimizer, rows of one width, and no keys.
        """
        owners = {
            id(p): name
            for name, optimizer in self._optimizers.items()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        found: dict[Any, list[torch.Tensor]] = {}
        for param in params:
            key: Any = (owners.get(id(param)), param.shape[1:], param.dtype, param.device)
            if key[0] is None or find_keyed_gradient(param) is not None:
                key = id(param)
            found.setdefault(key, []).append(param)
        return list(found.values())

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if a script's optimizer would update rows that update themselves.

        Likewise if several GradScalers may have scaled the gradients of rows.
        """
        if self._optimizers and len(self._find_scalers()) > 1:
            raise UserError(
                "the job protects two GradScalers and tables of holdfast.tables: give one scaler "
                "to all calls of step.backward, so that it is known how rows are unscaled"
            )
        if not isinstance(value, torch.optim.Optimizer) or name in self._optimizers:
            return
        mine = {id(p) for group in value.param_groups for p in group["params"]}
        for owner, optimizer in self._optimizers.items():
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                table = owner.removesuffix(f".{ATTRIBUTE}")
                raise UserError(
                    f"job.protect({name}=...): this {type(value).__name__} has the parameters of "
                    f"{table}, whose rows the job updates itself: leave them out of the optimizer"
                )

    # ------------------------------------------------------------ the steps

    def check_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Raise UserError if step.backward was given another GradScaler than the protected one."""
        if not self._optimizers:
            return
        given = [scaler] if scaler is not None and scaler.is_enabled() else []
        known = self._find_scalers()
        if given and not known:
            raise UserError(
                "step.backward was given a GradScaler that is not protected, with tables of "
                "holdfast.tables: name it in job.protect(...), because each worker unscales rows"
            )
        if known != given:
            raise UserError(
                "step.backward was not given the protected GradScaler, with tables of "
                "holdfast.tables: call step.backward(loss, scaler) with the loss as it is, as "
                "it unscales the rows, too; or make the scaler with enabled=False"
            )

    def hold(self) -> None:
        """Keep the committed gradients of rows until the script calls its optimizer.

        They are unscaled at once. Those of a table that are then not finite are dropped, and the
        scaler is to learn of it, as of gradients of other parameters.
        """
        self._waiting = []
        for optimizer in self._optimizers.values():
            used = [p for p in _params_of(optimizer) if p.grad is not None]
            for param in used:
                param.grad = RowGradient.of(param)
            for scaler in self._find_scalers():
                if used:
                    scaler.unscale_(optimizer)
                if not all(bool(p.grad.isfinite().all()) for p in used if p.grad is not None):
                    optimizer.zero_grad()
            if used:
                self._waiting.append(optimizer)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the rows that wait for it, because the script's optimizer is about to step.

        An optimizer of rows that the script calls itself updates its own rows only.
        """
        if any(optimizer is each for each in self._optimizers.values()):
            self._waiting = [each for each in self._waiting if each is not optimizer]
            return
        # A fused optimizer of torch is called in any case, and leaves its step out itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            self._drop()
        else:
            self._apply()

    def settle(self, step: int) -> str:
        """Update rows that still wait after the step of this number, or drop their gradients.

        They are dropped if the job protects other optimizers and the script has called none: no
        parameter is updated then. Returns a sentence about it the first time, except with a
        GradScaler, which leaves out steps by itself.
        """
        if not self._waiting:
            return ""
        if not self.waits_for_script:
            self._apply()
            return ""
        self._drop()
        if self._has_dropped or self._find_scalers():
            return ""
        self._has_dropped = True
        return NOT_UPDATED.format(step=step)

    @property
    def waits_for_script(self) -> bool:
        """Return whether the job protects an optimizer that the script has to call."""
        own = self._optimizers.values()
        return any(
            all(part is not each for each in own)
            for value in self._others.values()
            for part in find_parts(value, torch.optim.Optimizer)
        )

    def _apply(self) -> None:
        while self._waiting:
            optimizer = self._waiting.pop(0)
            optimizer.step()
            optimizer.zero_grad()

    def _drop(self) -> None:
        for optimizer in self._waiting:
            optimizer.zero_grad()
        self._waiting = []

    def _find_scalers(self) -> list[torch.amp.GradScaler]:
        """Return the protected GradScalers that scale anything."""
        found = [
            each
            for value in self._others.values()
            for each in find_parts(value, torch.amp.GradScaler)
            if each.is_enabled()
        ]
        return list({id(each): each for each in found}.values())


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _trained_tables(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's tables whose rows are trained."""
    names: Sequence[str] = getattr(optimizer, "table_names", ())
    return [n for n, p in zip(names, _params_of(optimizer), strict=False) if p.requires_grad]


def find_parts(protected: Any, *kinds: type[T]) -> list[T]:
    """Return an object and its attributes, as far as they are of these types.

    Lists among the attributes are looked into.
    """
    every: list[Any] = [protected]
    for each in getattr(protected, "__dict__", {}).values():
        every += each if isinstance(each, list | tuple) else [each]
    return [each for each in every if isinstance(each, kinds)]
