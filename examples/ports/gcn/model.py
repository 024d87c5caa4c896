"""A graph convolutional network on a made-up graph, in the style of tkipf/pygcn (MIT).

The model comes from Kipf and Welling (2017).
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

GROUPS, FEATURES = 4, 16


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--graph-nodes", type=int, default=240)
    parser.add_argument("--print-every", type=int, default=20)
    return parser.parse_args()


def graph(nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, normalised adjacency (sparse) and groups of nodes that like their own."""
    dice = torch.Generator().manual_seed(1)
    groups = torch.arange(nodes) % GROUPS
    chance = torch.where(groups[:, None] == groups, 0.10, 0.02)
    upper = (torch.rand(nodes, nodes, generator=dice) < chance).float().triu(1)
    linked = upper + upper.T + torch.eye(nodes)
    scale = linked.sum(1).rsqrt()
    features = F.one_hot(groups, FEATURES) + 1.5 * torch.randn(nodes, FEATURES, generator=dice)
    return features, (scale[:, None] * linked * scale).to_sparse_coo(), groups


class GCN(nn.Module):
    """Mixes the features of neighbours twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, GROUPS)

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(torch.sparse.mm(adjacency, self.first(features)))
        hidden = F.dropout(hidden, 0.5, self.training)
        return torch.sparse.mm(adjacency, self.second(hidden))


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
