"""Makes what a worker shares of a step, without a job: its gradients, its table, its buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.types import Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import LateWorker
from holdfast.engine.train.exchange.layout import piece_of
from holdfast.engine.train.state.step_image import MissedSteps
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


def in_view(rank: int, donors: int, transport: Any = None, step: int = 0) -> Any:
    """Return a member's part in a view that resumes at `step`; the first ranks are its donors."""
    return SimpleNamespace(
        view=SimpleNamespace(rank=int, resume_step=step),
        layout=SimpleNamespace(rank=rank),
        transport=transport,
        donors=list(range(donors)),
        piece=lambda numel: piece_of(rank, donors, numel),
    )


def keep_missed(missed: MissedSteps, index: int, rank: int = 0, donors: int = 1) -> None:
    missed.keep(ef.KeepStep(SinkKind.LATE, ViewNumber(1), index), in_view(rank, donors))


def send_missed(
    missed: MissedSteps, transport: Any, steps: range, rank: int = 0, donors: int = 1
) -> None:
    """Send steps to the worker after the donors."""
    to = LateWorker(worker=WorkerId(donors), incarnation=Incarnation(1), committed=steps.start)
    order = ef.SendMissed(ViewNumber(1), to)
    missed.send_kept(order, in_view(rank, donors, transport, steps.stop))


def receive_missed(missed: MissedSteps, transport: Any, donors: int) -> None:
    order = ef.ObtainStep(SourceKind.MEMBERS, ViewNumber(1), 0)
    missed.take_step(order, in_view(donors, donors, transport))
