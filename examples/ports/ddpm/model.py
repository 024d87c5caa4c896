"""A diffusion model of points, and the average of its weights in a class of its own.

It follows the structure of many trainers of denoising diffusion models (Ho, Jain and Abbeel 2020),
for example lucidrains/denoising-diffusion-pytorch (MIT).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

NOISE_STEPS = 50


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--print-every", type=int, default=50)
    return parser.parse_args()


def spiral(count: int) -> TensorDataset:
    """Return points [count, 2] on a spiral."""
    turn = 3 * math.pi * torch.rand(count, 1, generator=torch.Generator().manual_seed(1)).sqrt()
    return TensorDataset(torch.cat([turn * turn.cos(), turn * turn.sin()], dim=1) / 6)


class Denoiser(nn.Module):
    """Predicts the noise in points [n, 2] after t [n] of the noise steps."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Embedding(NOISE_STEPS, width)
        self.points = nn.Linear(2, width)
        self.rest = nn.Sequential(
            *(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.05), nn.Linear(width, 2)),
        )

    def forward(self, points: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.rest(self.points(points) + self.time(t))


class Diffusion:
    """Adds noise to points, and takes it away step by step."""

    def __init__(self) -> None:
        self.betas = torch.linspace(1e-3, 0.2, NOISE_STEPS)
        self.kept = torch.cumprod(1 - self.betas, dim=0)

    def loss(self, model: nn.Module, points: torch.Tensor) -> torch.Tensor:
        t = torch.randint(NOISE_STEPS, (len(points),))
        noise = torch.randn_like(points)
        kept = self.kept[t][:, None]
        return F.mse_loss(model(kept.sqrt() * points + (1 - kept).sqrt() * noise, t), noise)

    @torch.no_grad()
    def sample(self, model: nn.Module, count: int) -> torch.Tensor:
        points = torch.randn(count, 2)
        for step in reversed(range(NOISE_STEPS)):
            beta, kept = self.betas[step], self.kept[step]
            noise = model(points, torch.full((count,), step))
            points = (points - beta / (1 - kept).sqrt() * noise) / (1 - beta).sqrt()
            points += beta.sqrt() * torch.randn(count, 2) * (step > 0)
        return points


class EMA:
    """Keeps an average of a model's weights, once the first steps are over."""

    def __init__(self, model: nn.Module, beta: float = 0.99, first_steps: int = 5) -> None:
        self.ma = copy.deepcopy(model).requires_grad_(False)
        self.beta, self.first_steps = beta, first_steps

    def update(self, model: nn.Module, step: int) -> None:
        if step < self.first_steps:
            self.ma.load_state_dict(model.state_dict())
            return
        for average, new in zip(self.ma.parameters(), model.parameters(), strict=True):
            average.data = self.beta * average.data + (1 - self.beta) * new.data


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
