"""Sharpness-aware minimization as an optimizer around another one, as davda54/sam (MIT) has it.

The method comes from Foret, Kleiner, Mobahi and Neyshabur (2021).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rho", type=float, default=0.05)
    return parser.parse_args()


def rings(count: int, seed: int) -> TensorDataset:
    """Return points of three rings around the origin, and their rings."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=dice)
    points = torch.randn(count, 4, generator=dice)
    radius = 1 + labels + 0.3 * torch.randn(count, generator=dice)
    return TensorDataset(points / points.norm(dim=1, keepdim=True) * radius[:, None], labels)


def network(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3)),
    )


class SAM(torch.optim.Optimizer):
    """Goes to the worst point near by, and updates by the gradient that is found there."""

    def __init__(self, params: Iterable[nn.Parameter], base: Any, rho: float, **options: Any):
        super().__init__(params, dict(rho=rho, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base_optimizer.param_groups = self.param_groups


def hold_running_stats(model: nn.Module, held: bool) -> None:
    """Make BatchNorm learn from the first of the two passes only."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.0 if held else 0.1


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
