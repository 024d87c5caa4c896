"""Makes what a worker shares of a step, without a job: its gradients, its table, its buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.engine.train.step.driver import Monitor
from holdfast.engine.train.step.gradients import Gradients
from holdfast.engine.train.step.step_data import StepData
from holdfast.engine.train.step.step_table import Buffers, StepTable

VRANKS = 4


def make_step(features: int = 40) -> StepData:
    """Return the empty data of a step; the model has a layer with that number of inputs."""
    model = nn.Sequential(nn.Linear(features, 30), nn.BatchNorm1d(30))
    gradients = Gradients(model.named_parameters(), VRANKS, Monitor())
    gradients.attach()
    buffers = Buffers([("model", model)])
    buffers.remember()
    rest: Any = None
    table = StepTable(VRANKS, len(list(model.parameters())))
    return StepData(gradients, table, buffers, rest, rest)


def fill_step(step: StepData, index: int, left: bool = True) -> None:
    """Fill it with what follows from the step's number alone."""
    dice = torch.Generator().manual_seed(index)
    for bucket in step.gradients.buckets:
        bucket.result.data.copy_(torch.randn(bucket.result.data.shape, generator=dice))
    for vrank in range(VRANKS):
        step.table.put(vrank, 0.5 * index, index, 7 + vrank, (vrank, 1))
    step.table.used.copy_(torch.rand(step.table.used.shape, generator=dice) > 0.5)
    if left:
        step.buffers.receive(torch.arange(50 + index, dtype=torch.uint8))
    step.reduced_in = 3


def content_of(step: StepData) -> list[Any]:
    """Return the content of a reduced step as plain numbers."""
    results = [bucket.result.data.tolist() for bucket in step.gradients.buckets]
    left = None if step.buffers.left is None else step.buffers.left.tolist()
    rows = step.table.rows.tolist()
    return [results, rows, step.table.used.tolist(), left, step.reduced_in]
