"""Loads the job's state into the protected objects, and once more where the script needs that.

A worker that joins runs its script from the first line: it receives the state in its first loop,
and executes the lines between the loops that are over, which may change what it has received.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.train.checkpoint import state


class LoadedState:
    """Holds the protected objects, and the state that was loaded last until it is forgotten."""

    def __init__(self, protected: Mapping[str, Any]) -> None:
        self.protected = protected
        self._loaded: tuple[bytes, list[torch.Tensor]] | None = None

    def load(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        """Load a captured state. StateMismatch says what does not fit."""
        state.apply(self.protected, skeleton, tensors)
        self._loaded = skeleton, tensors

    def load_again(self) -> None:
        """Load the same state once more, if any was loaded."""
        if self._loaded is not None:
            state.apply(self.protected, *self._loaded)

    def forget(self) -> None:
        """Let its memory go."""
        self._loaded = None
