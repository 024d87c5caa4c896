"""Networks and made-up images for a DCGAN in the style of PyTorch's examples/dcgan (BSD-3)."""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import TensorDataset

NOISE = 16  # channels of the generator's input


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--images", type=int, default=512)
    return parser.parse_args()


def images(count: int) -> TensorDataset:
    """Return images [1, 16, 16] of one bright spot each, in -1 to 1."""
    dice = torch.Generator().manual_seed(1)
    grid = torch.linspace(-1, 1, 16)
    centre = torch.rand(count, 2, 1, 1, generator=dice) - 0.5
    distance = (grid[None, :, None] - centre[:, 0]) ** 2 + (grid - centre[:, 1]) ** 2
    return TensorDataset(2 * torch.exp(-8 * distance)[:, None] - 1)


def generator_network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * width, 4, 1, 0, bias=False),
        *(nn.BatchNorm2d(2 * width), nn.ReLU(True)),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU(True)),
        *(nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False), nn.Tanh()),
    )


def critic_network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        *(nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, True)),
        *(nn.Conv2d(2 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0), nn.Sigmoid()),
    )


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
