"""Keeps how far the members of a view are in a step, as one member knows it. Pure.

The parts of the step machine share it, as the machines of a worker share its standing.
"""

from __future__ import annotations

from holdfast.engine.core.errors import require
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.step.activities import ACTIVITY_MOVES, STEPPING, SUMMED, Activity
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View


class Course:
    """Keeps the present view, and what its members do together."""

    def __init__(self, standing: Standing) -> None:
        self.view: View
        #: The hosts of the virtual ranks in the step to be committed next.
        self.owners: tuple[WorkerId, ...] = ()
        self._standing = standing
        self._activity = Activity.CLOSED

    def enter(self, view: View) -> None:
        """Begin a view, whose members connect first."""
        self.view, self.owners = view, view.owners
        self.go_to(Activity.SYNC)

    @property
    def activity(self) -> Activity:
        """Return the activity of the view's members, as far as this member knows."""
        return self._activity

    def go_to(self, activity: Activity) -> None:
        """Begin an activity. InvariantError if it may not follow the present one."""
        self._activity = ACTIVITY_MOVES.check(self._activity, activity)

    @property
    def step(self) -> int:
        """Return the step to be committed next."""
        return self._standing.status.committed

    @property
    def is_synced(self) -> bool:
        """Return whether the members of the view take steps by now."""
        return self._activity in STEPPING

    def check(self, *, has_sums: bool) -> None:
        """Assert the invariants between two events; `has_sums`: those of the step are here."""
        closed = self._activity is Activity.CLOSED
        require(closed is not self._standing.acts, f"acts while {self._activity.value}")
        require(has_sums or self._activity not in SUMMED, f"no sums while {self._activity.value}")
