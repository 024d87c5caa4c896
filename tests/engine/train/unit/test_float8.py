"""Float8 is kept where it stands still; gradients in it, and quantized tensors, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import loop_kit
from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Job

FLOAT8 = torch.float8_e4m3fn


class Quantized(nn.Module):
    """Multiplies by a buffer and by a parameter in float8."""

    def __init__(self, *, trains: bool = False) -> None:
        super().__init__()
        weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(4))
        self.register_buffer("first", weight.to(FLOAT8))
        self.second = nn.Parameter(weight.T.to(FLOAT8), requires_grad=trains)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.first.float() @ self.second.float()


def train(job: Job, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(loop_kit.dataset(), batch_size=4), until=6):
        loop_kit.step_once(step, model, optimizer)


def test_a_frozen_base_in_float8_changes_no_bits() -> None:
    def script(job: Job, me: Any) -> str:
        model = nn.Sequential(Quantized(), loop_kit.net())
        train(job, model)
        return loop_kit.digest(model.to(torch.float32))

    loop_kit.everywhere(script)


def refused(model: nn.Module) -> str:
    """Train a model that is refused; return the sentence."""
    found: list[str] = []

    def script(job: Job, me: Any) -> None:
        with pytest.raises(UserError) as caught:
            train(job, model)
        found.append(str(caught.value))
        raise UserError("as expected")

    with pytest.raises(AssertionError, match="as expected"):
        loop_kit.results(script, 1)
    return found[0]


def test_gradients_in_float8_are_refused() -> None:
    said = refused(nn.Sequential(Quantized(trains=True), loop_kit.net()))
    assert "model.0.second is trained in float8_e4m3fn" in said
    assert "cast to float8_e4m3fn in the forward pass" in said


def test_a_tensor_that_is_made_of_several_is_named() -> None:
    layer = nn.Linear(6, 6)
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    said = refused(nn.Sequential(layer, loop_kit.net()))
    assert "['0.weight'] is of type TwoTensor" in said
    assert "quantize after training" in said


def test_an_optimizers_state_that_is_made_of_several_is_named() -> None:
    """It is found in the fingerprint of the next step, before a worker would join."""

    def script(job: Job, me: Any) -> None:
        model, optimizer = loop_kit.protected(job)
        for step in job.steps(job.batches(loop_kit.dataset(), batch_size=4), until=6):
            loop_kit.step_once(step, model, optimizer)
            for state in optimizer.state.values():
                kept = state["exp_avg"]
                state["exp_avg"] = kept if isinstance(kept, TwoTensor) else TwoTensor(kept, kept)

    with pytest.raises(AssertionError, match="exp_avg of an optimizer is of type TwoTensor"):
        loop_kit.results(script, 1)
