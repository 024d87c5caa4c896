"""Carries a gradient whose rows are named by any 64-bit keys, beside a parameter without rows.

A sparse tensor of torch needs a size, and 2^64 rows are too many for it. So the parameter is empty,
with the width of the rows. Its gradient in torch is empty, too, and says only that there is one.
"""

from __future__ import annotations

from typing import Any

import torch

ATTRIBUTE = "keyed_gradient"


class KeyedGradient:
    """Collects the rows of one parameter's gradient that backward passes compute."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add rows [n, dim] of keys [n], each once and in growing order."""
        self._parts.append((keys, values))

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the added rows, and forget them."""
        taken, self._parts = self._parts, []
        return taken


def collect_keys(param: torch.Tensor) -> None:
    """Have a parameter without rows collect the rows of its gradient by key."""
    setattr(param, ATTRIBUTE, KeyedGradient())


def find_keyed_gradient(param: Any) -> KeyedGradient | None:
    """Return what collects the rows of a parameter's gradient, None for other parameters."""
    found: KeyedGradient | None = getattr(param, ATTRIBUTE, None)
    return found
