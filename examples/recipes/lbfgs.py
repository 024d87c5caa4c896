"""Minimizes a loss over all samples by L-BFGS, with one evaluation of the loss for each step.

A recipe: copy this file next to your script, and import it from there.

The idea is Sandblaster's (Dean et al., "Large Scale Distributed Deep Networks", 2012): many
portions of the batch, far more than workers, and one optimizer over their sum. Here the portions
are virtual ranks: the portions of a lost or late worker go to other workers, and the sum is always
the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from holdfast import UserError

# The share of the slope's promise that a step must keep.
DECREASE = 1e-4
# A step that was too long is multiplied by a number between these.
SHORTEST, LONGEST = 0.1, 0.5
# Lengths that are tried in one direction.
TRIES_MAX = 20


class LBFGS(torch.optim.Optimizer):
    """L-BFGS with a backtracking line search, without closures: `step` is given the loss.

        data = job.batches(samples, batch_size=len(samples) // virtual)  # all of them in each step
        for step in job.steps(data, until=200):
            ...
            optimizer.step(step.loss)
        optimizer.settle()

    Each step evaluates the loss once, at a point that the optimizer has chosen. If the loss has
    fallen enough, the next direction follows from the last `history_size` changes of the gradient;
    otherwise a shorter step in the same direction is tried. Algorithms 3.1, 7.4 and 7.5 of Nocedal
    and Wright, Numerical Optimization (2006). It takes 2 * history_size + 3 times the memory of the
    parameters, which must be of one type and on one device. UserError for bad settings.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1.0,
        history_size: int = 10,
        tolerance_grad: float = 1e-7,
    ) -> None:
        if not (lr > 0 and math.isfinite(lr)):
            raise UserError(f"LBFGS(lr={lr}): give a positive number")
        if history_size < 1:
            raise UserError(f"LBFGS(history_size={history_size}): give 1 or more")
        if not tolerance_grad >= 0:
            raise UserError(f"LBFGS(tolerance_grad={tolerance_grad}): give 0 or more")
        settings = {"lr": lr, "history_size": history_size, "tolerance_grad": tolerance_grad}
        super().__init__(params, settings)
        if len(self.param_groups) != 1:
            raise UserError("LBFGS takes one group of parameters")
        self._params: list[torch.Tensor] = self.param_groups[0]["params"]
        if len({(p.dtype, p.device) for p in self._params}) != 1:
            raise UserError("LBFGS: all parameters must have one type and be on one device")

    @property
    def is_converged(self) -> bool:
        """Return whether the gradient was at most `tolerance_grad` in the last step."""
        return bool(self.state[self._params[0]].get("is_converged", False))

    @torch.no_grad()
    def step(self, loss: Any) -> float:  # type: ignore[override]
        """Move the parameters to the point at which to evaluate next; return the loss.

        `loss`: at the present point, over all samples, as are the gradients: a number or a tensor
        of one. UserError for a closure, which this optimizer cannot use.
        """
        if callable(loss) and not isinstance(loss, torch.Tensor):
            raise UserError("LBFGS.step: give the loss, optimizer.step(step.loss), and no closure")
        value, grad = float(loss), self._flat(p.grad for p in self._params)
        state = self.state[self._params[0]]
        if not state:
            self._begin(state, value, grad)
        elif not state["is_converged"]:
            self._judge(state, value, grad)
        if state["is_converged"]:
            self._set(state["point"])
        else:
            self._move(state)
        return value

    @torch.no_grad()
    def settle(self) -> None:
        """Put the parameters back to the best point that was evaluated, once training is over."""
        point = self.state[self._params[0]].get("point")
        if point is not None:
            self._set(point)

    # ------------------------------------------------------------ one evaluation

    def _begin(self, state: dict[str, Any], loss: float, grad: torch.Tensor) -> None:
        size = self.param_groups[0]["history_size"]
        point = self._flat(self._params)
        state["point"], state["direction"] = point, torch.empty_like(point)
        state["steps"] = point.new_zeros(size, len(point))
        state["changes"] = point.new_zeros(size, len(point))
        state["kept"], state["accepted"] = 0, 0
        self._accept(state, point, loss, grad)

    def _judge(self, state: dict[str, Any], loss: float, grad: torch.Tensor) -> None:
        """Accept the point if the loss has fallen enough, or choose a shorter step."""
        length, slope = state["length"], state["slope"]
        if loss <= state["loss"] + DECREASE * length * slope:
            point = self._flat(self._params)
            self._remember(state, point - state["point"], grad - state["grad"])
            self._accept(state, point, loss, grad)
            return
        state["tries"] += 1
        if state["tries"] == TRIES_MAX:
            # The history misleads, or the point is the best already.
            state["kept"] = 0
            self._accept(state, state["point"], state["loss"], state["grad"])
            return
        excess = loss - state["loss"] - length * slope
        best = -slope * length / (2 * excess) if math.isfinite(excess) else SHORTEST
        state["length"] = length * min(max(best, SHORTEST), LONGEST)

    def _accept(
        self, state: dict[str, Any], point: torch.Tensor, loss: float, grad: torch.Tensor
    ) -> None:
        """Begin to search at this point, in a new direction."""
        state["point"], state["loss"], state["grad"], state["tries"] = point, loss, grad, 0
        most = float(grad.abs().max()) if grad.numel() else 0.0
        state["is_converged"] = most <= self.param_groups[0]["tolerance_grad"]
        state["direction"] = -self._times_inverse(state, grad)
        state["slope"] = _dot(state["direction"], grad)
        if not state["slope"] < 0:
            # Rounding has spoilt the direction.
            state["kept"], state["direction"] = 0, -grad
            state["slope"] = _dot(-grad, grad)
        first = min(1.0, 1.0 / max(float(grad.abs().sum()), 1e-30)) if not state["kept"] else 1.0
        state["length"] = first * self.param_groups[0]["lr"]

    def _remember(self, state: dict[str, Any], step: torch.Tensor, change: torch.Tensor) -> None:
        """Keep a step with the gradient's change, in place of the oldest ones."""
        if _dot(step, change) <= 1e-10 * _dot(change, change):
            # The loss is not convex there.
            return
        size = self.param_groups[0]["history_size"]
        place = state["accepted"] % size
        state["steps"][place], state["changes"][place] = step, change
        state["accepted"] += 1
        state["kept"] = min(state["kept"] + 1, size)

    def _times_inverse(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        """Return the approximate inverse of the Hessian, times the gradient: the two loops."""
        size, kept, last = self.param_groups[0]["history_size"], state["kept"], state["accepted"]
        places = [i % size for i in range(last - kept, last)]
        steps, changes = state["steps"], state["changes"]
        found, shares = grad.clone(), []
        for i in reversed(places):
            shares.append(_dot(steps[i], found) / _dot(steps[i], changes[i]))
            found.add_(changes[i], alpha=-shares[-1])
        if places:
            i = places[-1]
            found.mul_(_dot(steps[i], changes[i]) / _dot(changes[i], changes[i]))
        for i in places:
            again = _dot(changes[i], found) / _dot(steps[i], changes[i])
            found.add_(steps[i], alpha=shares.pop() - again)
        return found

    def _move(self, state: dict[str, Any]) -> None:
        """Move the parameters to the point at which to evaluate next."""
        self._set(torch.add(state["point"], state["direction"], alpha=state["length"]))

    def _set(self, point: torch.Tensor) -> None:
        parts = point.split([p.numel() for p in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.copy_(part.view_as(param))

    def _flat(self, tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """Return all of them as one vector; None counts as zeros of a parameter's size."""
        pairs = zip(tensors, self._params, strict=True)
        return torch.cat([(torch.zeros_like(p) if t is None else t).reshape(-1) for t, p in pairs])


def _dot(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.dot(left.double(), right.double()))
