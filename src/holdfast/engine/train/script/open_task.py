"""Keeps the result of the task whose batch the script has, while the script computes it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from holdfast.engine.core.errors import UserError, first_line
from holdfast.engine.train.step.step_table import LEFT_OUT, UNWEIGHTED

CAUGHT = (
    "the script caught an error in step.backward ({}), so only a part of this batch's gradient is "
    "here: let the error end the script, or decide before step.backward, by the batch itself, "
    "whether to leave it out by step.skip()"
)


@dataclass(slots=True)
class OpenTask:
    """Is one task of a step, from the moment in which the script gets its batch."""

    #: The virtual rank, and the number of samples in its batch.
    vrank: int
    count: int
    #: Its last backward has not been completed yet.
    is_owed: bool = True
    #: The error that has ended a backward of this task; empty if there was none.
    caught: str = ""
    loss: float = 0.0
    #: The weight of its losses; None: no backward has been called.
    weight: float | None = None
    #: The values that it has gathered, by name.
    values: dict[str, bytes] = field(default_factory=dict)

    def check_weight(self, weight: float) -> None:
        """Check a further loss of this weight, or UNWEIGHTED. UserError."""
        if self.caught:
            raise UserError(CAUGHT.format(self.caught))
        if weight < 0 and self.weight is not None and self.weight >= 0:
            raise UserError("a batch's losses were given a weight once and not another time")

    def run_backward(
        self,
        loss: torch.Tensor,
        taking: AbstractContextManager[None],
        *,
        retain_graph: bool,
        counts: bool,
    ) -> None:
        """Compute gradients, which `taking` takes in; without any if the loss does not count.

        A pass that fails makes the whole task fail, also if the script catches the error.
        """
        try:
            with taking:
                if counts:
                    loss.backward(retain_graph=retain_graph)
        except BaseException as error:
            self.caught = first_line(error)
            raise

    def add_loss(self, loss: float, weight: float, *, is_mean: bool, last: bool) -> None:
        """Add a loss of this weight, or UNWEIGHTED; `is_mean`: the weight is the batch's own."""
        self.loss += loss
        if is_mean or weight < 0:
            self.weight = weight
        else:
            self.weight = max(self.weight or 0.0, 0.0) + weight
        self.is_owed = not last

    def leave_out(self) -> None:
        """Leave the batch out. UserError after a backward."""
        if not self.is_owed or self.weight is not None or self.caught:
            raise UserError(
                "step.skip was called without a new batch: call it once for a batch, in place of "
                "step.backward"
            )
        self.is_owed, self.weight = False, LEFT_OUT

    def check_done(self) -> None:
        """Check that the script has computed the whole task. UserError."""
        if self.caught:
            raise UserError(CAUGHT.format(self.caught))
        if self.is_owed:
            raise UserError(
                "a batch had no last step.backward(loss): call it once for each batch, or with "
                "last=False for all but the last time; step.skip() leaves a batch out"
            )

    @property
    def weight_of_losses(self) -> float:
        """Return the weight of the task's losses, or UNWEIGHTED."""
        return UNWEIGHTED if self.weight is None else self.weight
