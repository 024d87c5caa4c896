"""Tests of an optimizer around another one with the same parameter groups, as in SAM."""

from __future__ import annotations

from collections.abc import Callable
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


class Holder:
    """Has an optimizer without tensors in its state; `saves`: its state has the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, saves: bool) -> None:
        self.optimizer = optimizer
        self._saves = saves

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [self.optimizer.state_dict()]} if self._saves else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._saves:
            self.optimizer.load_state_dict(state["parts"][0])


def held(*, saves: bool | None) -> Callable[[Job, ThreadWorker], Any]:
    """Return a script that protects a scheduler, and its optimizer in a holder at most."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 2, 0.5)
        if saves is None:
            job.protect(model=model, scheduler=scheduler)
        else:
            holder = Holder(optimizer, saves=saves)
            job.protect(model=model, holder=holder, scheduler=scheduler)
        for step in job.steps(job.batches(dataset(), 3), until=12):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return digest(model), optimizer.param_groups[0]["lr"]

    return script


def test_a_scheduler_does_not_protect_its_optimizer() -> None:
    refused(held(saves=None), "is not protected, so that a worker that joins would not have")


def test_a_holder_that_does_not_save_scheduled_rates_is_refused() -> None:
    refused(held(saves=False), "the learning rates of the SGD inside it")


@pytest.mark.slow
def test_a_holder_that_saves_scheduled_rates_is_enough() -> None:
    everywhere(held(saves=True))


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
