"""Loads the job's state into the protected objects, and once more where the script needs that.

A worker that joins runs its script from the first line. It receives the state in its first loop,
and then executes the lines between the loops that are over, which may change that state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.state_comparison import check_loaded
from holdfast.engine.train.optimizer_sharding.sharded_optimizers import ShardedOptimizers


class LoadedState:
    """Keeps the protected objects, and the last loaded state until `forget`.

    `sharding`: shares out their optimizers' state; other members' states are then neither captured
    nor loaded.
    """

    def __init__(
        self, protected: Mapping[str, Any], sharding: ShardedOptimizers | None = None
    ) -> None:
        self._protected = protected
        self._sharding = sharding
        self._loaded: tuple[bytes, list[torch.Tensor]] | None = None

    def capture(self) -> tuple[bytes, list[torch.Tensor]]:
        """Capture the state that all members of a view must have alike."""
        if self._sharding is None:
            return state.capture(self._protected)
        return state.flatten(self._sharding.common(), "state")

    def load(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        """Load a captured state. StateMismatch describes the difference."""
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
        """Free the memory of the loaded state."""
        self._loaded = None

    def _apply(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        only = dict if self._sharding is None else self._sharding.drop_others
        state.apply(self._protected, skeleton, tensors, only)
