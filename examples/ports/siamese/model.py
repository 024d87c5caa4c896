"""A siamese network and pairs of made-up images, as in PyTorch's examples/siamese_network (BSD-3).

The loss is the contrastive one of Hadsell, Chopra and LeCun (2006).
"""

from __future__ import annotations

import argparse
import hashlib
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

CLASSES = 4


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--images", type=int, default=512)
    return parser.parse_args()


class Pairs(Dataset):
    """Gives an image, a random other one, and whether both are of one class."""

    def __init__(self, count: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        patterns = torch.randn(CLASSES, 1, 12, 12, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(CLASSES, (count,), generator=dice)
        self.images = patterns[self.labels] + torch.randn(count, 1, 12, 12, generator=dice)
        self.of_class = [(self.labels == each).nonzero().flatten() for each in range(CLASSES)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        same = random.random() < 0.5
        wanted = int(self.labels[index])
        if not same:
            wanted = random.choice([each for each in range(CLASSES) if each != wanted])
        other = random.choice(self.of_class[wanted].tolist())
        return self.images[index], self.images[other], float(same)


class Siamese(nn.Module):
    """Maps both images by one network, and returns their distances."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(200, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8)),
        )

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.pairwise_distance(self.features(one), self.features(other))


def contrastive(distance: torch.Tensor, same: torch.Tensor, margin: float = 1.0) -> torch.Tensor:
    apart = (margin - distance).clamp(min=0)
    return (same * distance**2 + (1 - same) * apart**2).mean()


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
