"""Decides where a worker rests whose ledger cannot grow, because the file system is full. Pure.

It takes a few more steps if its state can then be saved: the members of a view agree on a
checkpoint in the votes of a step.
"""

from __future__ import annotations

from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.replica.saves import Saves

STEPS_MAX = 16  # without room: their lines are kept in memory


class RoomWait:
    """Knows since which step a worker lacks room, and whether it is held at a boundary."""

    def __init__(self, standing: Standing, saves: Saves) -> None:
        self.is_held = False  # it rests at a boundary only because it lacks room
        self._standing = standing
        self._saves = saves
        self._since = 0  # the step at which it lacked room first

    def see(self, *, has_room: bool) -> None:
        """Record whether the ledger can grow; if it cannot, the state is to be saved."""
        if not has_room:
            self._since = self._standing.status.committed
            self._saves.want_now()
        self._standing.change(no_room=not has_room)
        self._standing.tell()

    def holds(self) -> bool:
        """Return whether the worker has to rest instead of beginning its next step."""
        status = self._standing.status
        goes_on = self._saves.can_save and status.committed < self._since + STEPS_MAX
        self.is_held = status.no_room and not goes_on
        if self.is_held:
            self._standing.tell()
        return self.is_held

    def makes_way(self) -> bool:
        """Return whether to leave the view at once for a planned change: no step will end it.

        A change that needs the last state saved has to wait for room.
        """
        standing = self._standing
        return self.is_held and standing.is_change_pending and not standing.pending_save

    def close(self) -> None:
        """Forget what has held the worker in a view, now that this is over."""
        self.is_held = False
