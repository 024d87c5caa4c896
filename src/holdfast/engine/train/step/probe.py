"""Points of a worker where a test kit may look in, or disturb. By default it is empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Probe:
    """Replace `probe` before the first step. An exception from a method ends the worker's script.

    `is_noisy`: a task's bits differ each time, as with kernels that are not deterministic.
    """

    is_noisy = False

    def boundary(self, step: int, protected: Mapping[str, Any]) -> None:
        """The state after `step` steps is at rest."""

    def handle_task(self, step: int, vrank: int) -> None:
        """A task was computed; what happens here counts as a part of it."""

    def handle_gradient(self, vrank: int, flat: torch.Tensor) -> None:
        """A bucket of a task's gradient has been computed, and is not added to anything yet."""

    def handle_received(self, flat: torch.Tensor) -> None:
        """A partial sum has come from another worker."""

    def handle_sending(self, peer: int, size: int) -> None:
        """The engine is about to send `size` bytes of a bucket to rank `peer`."""


class _Current:
    """Keeps the probe in use."""

    def __init__(self) -> None:
        self.probe = Probe()


current = _Current()
