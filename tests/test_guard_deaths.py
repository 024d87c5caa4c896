"""Tests that a script which breaks the promise is told so, and nobody blamed, while workers die."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.train.job import Job
from loop_kit import dataset, protected, step_once
from test_guard import told
from thread_cluster import ThreadWorker

STEPS = 30
# Exchanges of the first steps: deaths in a step, while states are compared, and while what
# differs is found out.
BRIEF = (3, 7)
DEATHS = [
    pytest.param(death, marks=[] if death in BRIEF else pytest.mark.slow)
    for death in (3, 5, 7, 9, *range(10, 34))
]


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
