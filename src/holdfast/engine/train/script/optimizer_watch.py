"""Watches every optimizer of this process, so that none makes updates unknown to the job.

PyTorch calls one hook before each optimizer's step; the script's thread names the objects that it
protects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.checkpoint.state import tensors_in
from holdfast.engine.train.script.row_updates import RowUpdates, find_parts
from holdfast.engine.train.script.script_state import ScriptState

_local = threading.local()  # the watch of each thread that runs a script
_registered: list[Any] = []


class OptimizerWatch:
    """Checks the optimizers of one script. `in_step`: its loop over batches is under way.

    `rows`: receives each step. `sharding`: limits each update to the parameters that this worker
    owns.
    """

    def __init__(
        self,
        protected: Mapping[str, Any],
        in_step: Callable[[], bool],
        rows: RowUpdates,
        sharding: ShardedOptimizers | None = None,
    ) -> None:
        self.rows, self.sharding = rows, sharding
        self._protected = protected
        self._in_step = in_step
        # optimizers already checked, with the number of their groups
        self._known: dict[int, int] = {}
        self._inner: dict[int, str] = {}  # optimizers inside a protected object, with its name

    def start(self) -> None:
        """Watch the optimizers that the calling thread uses."""
        _local.watch = self
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_begin_step))
            _registered.append(register_optimizer_step_post_hook(_finish_step))

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer that would break the promise. Raises UserError."""
        name = type(optimizer).__name__
        if self._in_step():
            raise UserError(
                f"{name}.step() was called within the loop over a step's batches, where gradients "
                "are this worker's only: call it after that loop, and end the loop without `break`"
            )
        if self._known.get(id(optimizer)) == len(optimizer.param_groups):
            if id(optimizer) in self._inner:
                self._look_at_inner(optimizer, name)
            return
        self._look_at(optimizer, name)
        self._known[id(optimizer)] = len(optimizer.param_groups)

    def check_lookup(self, name: str, weight: Any, rows: torch.optim.Optimizer) -> None:
        """Refuse a look-up in a table that a task would train, and that is not protected.

        `rows`: the optimizer of its rows, by which it is found quickly. Raises UserError.
        """
        every = self._protected.values()
        if not self._in_step() or any(each is rows for each in every):
            return
        modules = (each for each in every if isinstance(each, torch.nn.Module))
        if all(p is not weight for module in modules for p in module.parameters()):
            raise UserError(
                f"table {name} is looked up in the loop over a step's batches, but is not "
                "protected, so that its rows would never be updated: name it, or the module that "
                "it is in, in job.protect(...)"
            )

    def _look_at(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        models = [(n, m) for n, m in self._protected.items() if isinstance(m, torch.nn.Module)]
        names = {id(p): f"{n}.{key}" for n, m in models for key, p in m.named_parameters()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:
            if id(p) not in names:
                raise UserError(
                    f"{name} updates a parameter of shape {list(p.shape)} that belongs to no "
                    "protected module, so that its gradients are not summed over workers: name its "
                    "module in job.protect(...)"
                )
        holders = [n for n, each in self._protected.items() if _holds(each, optimizer)]
        if holders and not any(self._protected[n] is optimizer for n in holders):
            self._inner[id(optimizer)] = holders[0]
        if not holders:
            which = names[id(params[0])] if params else "nothing"
            raise UserError(
                f"{name}, which updates {which}, is not protected, so that a worker that joins "
                "would not have its state: job.protect(optimizer=...)"
            )
        if _is_scheduled(optimizer) and all(
            _is_no_scheduler(each) for each in self._protected.values()
        ):
            raise UserError(
                f"a learning rate scheduler of {name} is not protected, so that a worker that "
                "joins would begin with a fresh one: job.protect(scheduler=...)"
            )

    def _look_at_inner(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Check that an object saves the state of an optimizer inside it, once that has some.

        UserError if it is not.
        """
        mine = next((each for each in tensors_in(optimizer.state) if each.numel() > 1), None)
        if mine is None and not _is_scheduled(optimizer):
            return
        outer = self._inner.pop(id(optimizer))
        kept = self._protected[outer].state_dict()
        if mine is not None and not _is_among(mine, tensors_in(kept)):
            raise UserError(
                f"{outer} is protected, but the state of the {name} inside it is not in its "
                "state_dict(), so that a worker that joins would begin with a fresh one: name "
                "that optimizer in job.protect(...), too"
            )
        if mine is None and not _has_rates(kept, optimizer):
            raise UserError(
                f"{outer} is protected, but the learning rates of the {name} inside it, which a "
                "scheduler changes, are not in its state_dict(), so that a worker that joins "
                "would begin with the first ones: name that optimizer in job.protect(...), too"
            )


def check_lookup(name: str, weight: Any, rows: torch.optim.Optimizer) -> None:
    """Raise UserError if a task of this thread looks a table up that is not protected."""
    watch: OptimizerWatch | None = getattr(_local, "watch", None)
    if watch is not None and weight.requires_grad and torch.is_grad_enabled():
        watch.check_lookup(name, weight, rows)


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    watch: OptimizerWatch | None = getattr(_local, "watch", None)
    if watch is None:
        return
    watch.check_step(optimizer)
    watch.rows.note_step(optimizer)
    if watch.sharding is not None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # after the optimizer
        watch.sharding.hide_others(optimizer, closure=closure is not None)


def _finish_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    watch: OptimizerWatch | None = getattr(_local, "watch", None)
    if watch is not None and watch.sharding is not None:
        watch.sharding.exchange_parameters()


def _holds(protected: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a protected object is this optimizer, or wraps it.

    A scheduler has its optimizer as an attribute, and does not save its state.
    """
    if isinstance(protected, LRScheduler):
        return False
    return any(each is optimizer for each in find_parts(protected, torch.optim.Optimizer))


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler changes the learning rates."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _has_rates(kept: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a state has the present learning rates of an optimizer, at any depth."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if isinstance(kept, Mapping):
        groups = kept.get("param_groups")
        if isinstance(groups, list) and [group.get("lr") for group in groups] == rates:
            return True
        kept = tuple(kept.values())
    return isinstance(kept, list | tuple) and any(_has_rates(each, optimizer) for each in kept)


def _is_among(one: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Return whether a tensor, or an equal one, is among these."""
    alike = (each for each in others if each.shape == one.shape and each.dtype == one.dtype)
    return any(each is one or (type(each) is torch.Tensor and each.equal(one)) for each in alike)


def _is_no_scheduler(protected: Any) -> bool:
    known = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, ScriptState)
    if isinstance(protected, LRScheduler):
        return False
    return isinstance(protected, known) and not find_parts(protected, LRScheduler)
