"""A large teacher and a small student, as in PyTorch's tutorial on knowledge distillation (BSD-3).

The loss comes from Hinton, Vinyals and Dean (2015).
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

INPUTS, CLASSES = 20, 5


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3, help="of the teacher, and of the student")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--soft-weight", type=float, default=0.25)
    return parser.parse_args()


def clusters(count: int, seed: int) -> TensorDataset:
    """Return points around a centre of each class, and their classes."""
    dice = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (count,), generator=dice)
    return TensorDataset(centres[labels] + 2 * torch.randn(count, INPUTS, generator=dice), labels)


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(INPUTS, width), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)),
    )


def soft_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    wanted = F.softmax(teacher / temperature, dim=1)
    found = F.log_softmax(student / temperature, dim=1)
    return F.kl_div(found, wanted, reduction="batchmean") * temperature**2


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of samples on which a model is right, leaving it in evaluation mode."""
    inputs, labels = data.tensors
    return float((model.eval()(inputs).argmax(1) == labels).float().mean())


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
