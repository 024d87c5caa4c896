"""Updates the tables of a job whose rows no optimizer of the script updates.

A module says so by an attribute `row_optimizer`, a torch optimizer. It becomes a part of the job's
state beside its module, and takes its step as soon as a step of the job is committed. Must not
know what a table is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.core.errors import UserError

ATTRIBUTE = "row_optimizer"


class RowUpdates:
    """Knows the optimizers of the protected modules' rows, by the names of these modules."""

    def __init__(self) -> None:
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def find(self, name: str, value: Any) -> dict[str, torch.optim.Optimizer]:
        """Return new optimizers within an object that is protected as `name`, by their names."""
        if not isinstance(value, nn.Module):
            return {}
        found = {}
        for path, module in value.named_modules(prefix=name):
            optimizer = getattr(module, ATTRIBUTE, None)
            known = any(optimizer is each for each in self._optimizers.values())
            if isinstance(optimizer, torch.optim.Optimizer) and not known:
                found[f"{path}.{ATTRIBUTE}"] = optimizer
        self._optimizers |= found
        return found

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if a script's optimizer would update rows that update themselves."""
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

    def apply(self) -> None:
        """Update all rows that the committed step has used, and forget their gradients."""
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
