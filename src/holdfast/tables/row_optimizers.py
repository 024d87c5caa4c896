"""Optimizers that update the rows of a table that a step has used, and leave the rest alone.

Each is a plain record with a function on whole arrays of rows, for one table as for many. A row's
new value is a function of the row, its slots, its gradient and the number of the step alone, so it
does not matter which other rows are updated with it, or where.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.step.table_parameters import RowGradient

Slots = Mapping[str, torch.Tensor]


class KeyedRows(Protocol):
    """Updates rows by key: see KeyedTable."""

    def update(
        self, keys: torch.Tensor, grads: torch.Tensor, rate: float, step: int, number: int
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer(ABC):
    """Updates the rows of tables. `lr`: the rate at first; param groups may change it later.

    A class of your own needs `slots` and `update`:

        class SignSGD(RowOptimizer):
            def slots(self, dim):
                return {}

            def update(self, rows, slots, grads, lr, step):
                rows.sub_(grads.sign(), alpha=lr)

        words = Embedding(1000, 8, name="words", optimizer=SignSGD(lr=0.01))
    """

    lr: float

    def __post_init__(self) -> None:
        self._check("lr", self.lr, at_least=0.0)

    @abstractmethod
    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        """Return the width and the first value of each slot of a row of `dim` numbers."""

    @abstractmethod
    def update(
        self, rows: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float, step: int
    ) -> None:
        """Update rows and slots in place.

        `rows`, `grads`: [rows, dim]; `slots`: [rows, width] each. `lr`: the rate now. `step`: 1 for
        the first update of the table, and so on.
        """

    def update_at(
        self,
        places: torch.Tensor,
        rows: torch.Tensor,
        slots: Slots,
        grads: torch.Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Update only the rows of a table at these places, in place.

        `places`: [n], each once; `rows`, `slots`: of the whole table; `grads`: [n, dim]. `lr` and
        `step`: as for `update`.
        """
        used = rows.index_select(0, places)
        used_slots = {name: each.index_select(0, places) for name, each in slots.items()}
        self.update(used, used_slots, grads, lr, step)
        rows.index_copy_(0, places, used)
        for name, each in used_slots.items():
            slots[name].index_copy_(0, places, each)

    def _check(self, name: str, value: float, *, at_least: float, below: float = math.inf) -> None:
        if not (at_least <= value < below):
            limit = f"{at_least:g} or more" if below == math.inf else f"{at_least:g} to {below:g}"
            raise UserError(f"{type(self).__name__}({name}={value}): give {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(RowOptimizer):
    """Plain gradient descent with momentum, in the formula of torch.optim.SGD.

    The `momentum` of a row that a step has not used stands still, unlike in torch.optim.SGD.

        words = Embedding(1000, 8, name="words", optimizer=SGD(lr=0.1, momentum=0.9))
    """

    lr: float = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        self._check("momentum", self.momentum, at_least=0.0)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        """Return one slot of the row's size if there is momentum."""
        return {"momentum_buffer": (dim, 0.0)} if self.momentum else {}

    def update(
        self, rows: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float, step: int
    ) -> None:
        """Apply rows -= lr * (momentum * buffer + grads)."""
        if self.momentum:
            grads = slots["momentum_buffer"].mul_(self.momentum).add_(grads)
        rows.add_(grads, alpha=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(RowOptimizer):
    """Adagrad with a sum of squares for each number, in the formula of torch.optim.Adagrad.

    `eps`, `initial_accumulator_value`: as in torch.

        words = Embedding(1000, 8, name="words", optimizer=Adagrad(lr=0.1))
    """

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        self._check("eps", self.eps, at_least=0.0)
        name, value = "initial_accumulator_value", self.initial_accumulator_value
        self._check(name, value, at_least=0.0)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        """Return one slot of the row's size."""
        return {"sum": (dim, self.initial_accumulator_value)}

    def update(
        self, rows: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float, step: int
    ) -> None:
        """Apply rows -= lr * grads / (sqrt(sum of squares) + eps)."""
        total = slots["sum"].add_(grads.pow(2))
        rows.add_(grads / total.sqrt().add_(self.eps), alpha=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum for each row: of the means of its squared gradients.

    It is fbgemm's EXACT_ROWWISE_ADAGRAD without weight decay, and keeps one number for each row.
    `eps`: added to the root of the sum.

        words = Embedding(1000, 8, name="words", optimizer=RowWiseAdagrad(lr=0.05))
    """

    lr: float = 0.01
    eps: float = 1e-8

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        self._check("eps", self.eps, at_least=0.0)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        """Return one slot of one number."""
        return {"sum": (1, 0.0)}

    def update(
        self, rows: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float, step: int
    ) -> None:
        """Apply rows -= lr * grads / (sqrt(sum) + eps)."""
        total = slots["sum"].add_(grads.pow(2).mean(1, keepdim=True))
        rows.add_(grads / total.sqrt().add_(self.eps), alpha=-lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyAdam(RowOptimizer):
    """Adam whose moments stand still for rows that a step has not used: torch.optim.SparseAdam.

    `betas`, `eps`: as in torch.

        words = Embedding(1000, 8, name="words", optimizer=LazyAdam(lr=1e-3))
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        self._check("eps", self.eps, at_least=0.0)
        for name, value in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            self._check(name, value, at_least=0.0, below=1.0)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        """Return two slots of the row's size."""
        return {"exp_avg": (dim, 0.0), "exp_avg_sq": (dim, 0.0)}

    def update(
        self, rows: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float, step: int
    ) -> None:
        """Apply Adam's formula; `step` corrects the bias of both moments."""
        beta1, beta2 = self.betas
        mean, square = slots["exp_avg"], slots["exp_avg_sq"]
        mean.add_(grads.sub(mean).mul_(1 - beta1))
        square.add_(grads.pow(2).sub_(square).mul_(1 - beta2))
        factor = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        rows.add_(-factor * mean.div(square.sqrt().add_(self.eps)))


class TableOptimizer(torch.optim.Optimizer):
    """Applies a RowOptimizer to tables with sparse gradients. Each is [rows, dim], float32."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        rule: RowOptimizer,
        keyed: Mapping[torch.Tensor, KeyedRows] | None = None,
        table_names: Sequence[str] = (),
    ) -> None:
        super().__init__(params, {"lr": rule.lr})
        self._rule, self._keyed = rule, keyed or {}
        self.table_names = list(table_names)  # in the order of the parameters

    def set_staleness(self, steps: int) -> None:
        """Take 0 only: rows in a worker have every update. UserError."""
        check_staleness(steps, 0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the rows of every table that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"])

    def _update(self, param: torch.Tensor, lr: float) -> None:
        # Made here, as it is needed: the caller's arrays may be dropped before, and their memory be
        # given to us.
        state, grad = self.state[param] or self._begin(param), param.grad
        assert grad is not None, "a table without a gradient"
        state["step"] += 1
        step = int(state["step"])
        if param in self._keyed:
            keys, values = rows_of(param)
            self._keyed[param].update(keys, values, lr, step, step)
            return
        slots = {name: state[name] for name in self._rule.slots(param.shape[1])}
        if grad.is_sparse:
            places, values = rows_of(param)
            self._rule.update_at(places, param, slots, values, lr=lr, step=step)
        else:
            self._rule.update(param, slots, grad, lr, step)

    def _begin(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make the state of a table that has not been updated yet, and return it."""
        state = {"step": torch.zeros((), dtype=torch.int64)}
        slots = {} if param in self._keyed else self._rule.slots(param.shape[1])
        for name, (width, first) in slots.items():
            state[name] = param.new_full((len(param), width), first)
        self.state[param] = state
        return state


def check_staleness(steps: int, most: int) -> None:
    """Raise UserError unless reads may leave out the updates of `steps` steps."""
    if not 0 <= steps <= most:
        raise UserError(
            f"set_staleness({steps}): give 0 to {most}, or start the job with servers and a "
            "greater --staleness"
        )


def rows_of(param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places or keys [n] and rows [n, dim] of a table's committed gradient."""
    grad = RowGradient.of(param)
    assert isinstance(grad, RowGradient), "a table without a sparse gradient"
    return grad.places, grad.rows
