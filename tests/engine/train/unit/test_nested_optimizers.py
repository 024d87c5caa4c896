"""Tests of an optimizer around another one with the same parameter groups, as in SAM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_guard import STEPS, refused
from torch import nn
from torch.optim.lr_scheduler import StepLR

from holdfast.engine.train.job import Job
from loop_kit import dataset, digest, everywhere, net
from thread_cluster import ThreadWorker


class Around(torch.optim.Optimizer):
    """Updates by another optimizer on its own parameter groups, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


def train(job: Job, model: nn.Module, optimizer: Around, scheduler: StepLR, until: int) -> None:
    for step in job.steps(job.batches(dataset(), 3), until=until):
        optimizer.zero_grad()
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()


@pytest.mark.slow
def test_groups_that_two_optimizers_share_are_shared_on_a_worker_that_joins() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        optimizer = Around(model.parameters())
        scheduler = StepLR(optimizer, 2, 0.5)
        job.protect(model=model, outer=optimizer, inner=optimizer.inner, scheduler=scheduler)
        train(job, model, optimizer, scheduler, 12)
        assert optimizer.param_groups is optimizer.inner.param_groups
        return digest(model), optimizer.inner.param_groups[0]["lr"]

    everywhere(script)


def test_an_inner_optimizer_whose_state_is_not_in_the_outer_ones_is_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model = net()
        optimizer = Around(model.parameters())
        scheduler = StepLR(optimizer, 2, 0.5)
        job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
        train(job, model, optimizer, scheduler, STEPS)

    refused(script, "the state of the SGD inside it is not in its state_dict()")


@pytest.mark.slow
def test_an_outer_optimizer_with_the_inner_ones_state_is_enough() -> None:
    class Whole(Around):
        """Returns the inner optimizer's state as its own."""

        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.state = self.inner.state

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            self.inner.state = self.state

    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        optimizer = Whole(model.parameters())
        scheduler = StepLR(optimizer, 2, 0.5)
        job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
        train(job, model, optimizer, scheduler, 12)
        return digest(model)

    everywhere(script)
