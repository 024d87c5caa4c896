"""A small classifier of sequences for a loop with autocast, scaled losses and accumulation.

The loop follows PyTorch's recipe on automatic mixed precision (BSD-3).
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset

WORDS = 32


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--accumulate", type=int, default=4, help="batches for each update")
    parser.add_argument("--warmup", type=int, default=8, help="updates")
    return parser.parse_args()


def sentences(count: int) -> TensorDataset:
    """Return sequences of words, and whether small words come first in them."""
    words = torch.randint(WORDS, (count, 12), generator=torch.Generator().manual_seed(1))
    labels = (words[:, :6].sum(1) < words[:, 6:].sum(1)).long()
    return TensorDataset(words, labels)


class Classifier(nn.Module):
    """Sorts sequences into two classes by attention over their words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(12, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words) + self.places.weight
        return self.head(self.layer(found).mean(1))


def warm_cosine(warmup: int, updates: int) -> Callable[[int], float]:
    """Return a schedule: up in a line, then down along half a cosine."""

    def rate(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min((update - warmup) / updates, 1.0)))

    return rate


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
