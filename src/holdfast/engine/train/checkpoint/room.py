"""Compares the size of a checkpoint with the free memory, before any of it is allocated."""

from __future__ import annotations

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.memory.free_memory import free_bytes


def check_room(needed: int, what: str) -> None:
    """Raise UserError if `what` takes more bytes of memory than are free on this machine."""
    free = free_bytes()
    if needed > free:
        raise UserError(
            f"{what} takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free here: "
            "use a machine with more, or check that this is the right checkpoint"
        )
