"""Makes a step of a job in one process, for tests and benchmarks without an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from downpour import Downpour

Loss = Callable[[Any, Any], torch.Tensor]  # takes the model's output and the targets


class LoneStep:
    """Stands for a step whose tasks are all computed here."""

    def __init__(self, index: int) -> None:
        self.index, self.virtual_rank = index, 0
        self.losses: list[float] = []  # one for each task
        self.gathered: dict[str, list[Any]] = {}

    def gather(self, name: str, value: Any) -> None:
        self.gathered.setdefault(name, []).append(copy.deepcopy(value))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.losses.append(loss.item())


def train_step(downpour: Downpour, index: int, batches: Iterable[Any], loss: Loss) -> list[float]:
    """Train a step with one batch for each virtual rank; return the losses of its tasks."""
    step: Any = LoneStep(index)
    for rank, batch in enumerate(batches):
        step.virtual_rank = rank
        for inputs, targets in downpour.minibatches(step, batch):
            downpour.backward(loss(downpour(inputs), targets))
    downpour.step(step)
    return step.losses
