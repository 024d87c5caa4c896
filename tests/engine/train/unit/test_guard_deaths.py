"""Tests that a script which breaks the promise is refused, without blame, while workers die."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_guard import told
from torch import nn

from holdfast.engine.train.job import Job
from loop_kit import dataset, net, protected
from thread_cluster import ThreadWorker

STEPS = 30
# Exchanges of the first steps: deaths in a step, while states are compared, and while what
# differs is found out.
BRIEF = (3, 7)
DEATHS = [
    pytest.param(death, marks=[] if death in BRIEF else pytest.mark.slow)
    for death in (3, 5, 7, 9, *range(10, 34))
]


def step_once(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # Not by a kit: a script's files are those of one folder.
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def sets_values_apart(job: Job, me: ThreadWorker) -> None:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        step_once(step, model, optimizer)
        job.values.update(mine=job.worker)


def updates_by_its_own_loss(job: Job, me: ThreadWorker) -> None:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            loss = nn.functional.mse_loss(model(x), y)
            step.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - loss.item() / 1000)


@pytest.mark.slow_with(
    "sets_values_apart-job.values['mine'] is-3",
    "sets_values_apart-job.values['mine'] is-7",
    "updates_by_its_own_loss-the script updates them by something-3",
    "updates_by_its_own_loss-the script updates them by something-7",
)
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize(
    ("script", "text"),
    [
        (sets_values_apart, "job.values['mine'] is"),
        (updates_by_its_own_loss, "the script updates them by something"),
    ],
)
def test_a_difference_between_workers_is_reported_whoever_dies(
    script: Any, text: str, death: int
) -> None:
    for workers in (2, 3):
        for worker in range(workers):
            cycle = {"silent_errors.fingerprint_steps": 1}
            assert text in told(script, workers, {worker: death}, **cycle)


class Average:
    """Keeps an average of weights, whose decay follows from a counter of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        share = 1 / (1 + self.updates)
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), share)


def test_a_counter_that_a_joiner_lacks_is_the_scripts_fault() -> None:
    """The script's average of weights would differ after each join: no machine is to blame."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        average = Average(model)
        job.protect(model=model, optimizer=optimizer, average=average.module)
        for step in job.steps(job.batches(dataset(), 3), until=60):
            step_once(step, model, optimizer)
            average.update(model)

    text = told(script, 3, {1: 9})
    assert "more tensors of worker 1 differ from those of the other workers" in text
    assert "average.updates (" in text
    assert "keep them in job.values" in text
