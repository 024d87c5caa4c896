"""Loads the job's state into the protected objects, and once more where the script needs that.

A worker that joins runs its script from the first line: it receives the state in its first loop,
and executes the lines between the loops that are over, which may change what it has received.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.train.checkpoint import state
from holdfast.train.checkpoint.state_comparison import check_loaded
from holdfast.train.optimizer_sharding.sharded_optimizers import ShardedOptimizers


class LoadedState:
    """Holds the protected objects, and the state that was loaded last until it is forgotten.

    `sharding`: of their optimizers, which is captured and loaded without what others own.
    """

    def __init__(
        self, protected: Mapping[str, Any], sharding: ShardedOptimizers | None = None
    ) -> None:
        self._protected = protected
        self._sharding = sharding
        self._loaded: tuple[bytes, list[torch.Tensor]] | None = None

    def capture(self) -> tuple[bytes, list[torch.Tensor]]:
        """Capture what all members of a view must hold alike."""
        if self._sharding is None:
            return state.capture(self._protected)
        return state.flatten(self._sharding.common(), "state")

    def load(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        """Load a captured state. StateMismatch says what does not fit."""
        self._apply(skeleton, tensors)
        self._loaded = skeleton, tensors

    def check(self) -> None:
        """Raise StateMismatch if the protected objects do not hold the state that was loaded."""
        if self._loaded is not None:
            check_loaded(self._loaded, self.capture())

    def load_again(self) -> None:
        """Load the same state once more, if any was loaded."""
        if self._loaded is not None:
            self._apply(*self._loaded)

    def forget(self) -> None:
        """Let its memory go."""
        self._loaded = None

    def _apply(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        only = dict if self._sharding is None else self._sharding.only_mine
        state.apply(self._protected, skeleton, tensors, only)
