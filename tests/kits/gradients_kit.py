"""Makes models with the same parameters each time, for tests of gradients."""

from __future__ import annotations

import torch
from torch import nn


def seeded(model: nn.Module, seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if real.is_floating_point():
                real.copy_(torch.randn(real.shape, generator=generator) / 3)
    return model
