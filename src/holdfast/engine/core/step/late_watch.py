"""Watches for late members while this worker's script waits for them. Pure.

A waiting worker first looks which members are late, and may copy their tasks. Later it reports that
some are late, so that the coordinator can suspend them. `Lateness` (speculation.py) judges when.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from holdfast.engine.core.ground import effects
from holdfast.engine.core.ground.standing import FOREVER, Standing
from holdfast.engine.core.step.speculation import Lateness, Patience, choose_copies
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase


class LateWatch:
    """Watches for one worker; `late` are the members whose tasks it may copy.

    `counts`, in its methods: the time of the step under way counts as the time of a step.
    """

    def __init__(self, standing: Standing, patience: Patience) -> None:
        self.lateness = Lateness(patience)
        self.late: tuple[WorkerId, ...] = ()
        self._standing = standing
        self._is_idle = False
        self._looked_in = -1  # the step in which it looked for late members

    def open_step(self) -> None:
        """Record that the script has opened a step: it waits for no member yet."""
        self._is_idle = False

    def record_idle(self, idle: bool) -> None:
        """Record whether the script waits for other members from now on; report a change."""
        if idle != self._is_idle:
            self._is_idle = idle
            self._report_idle(idle)

    def _report_idle(self, idle: bool) -> None:
        self._standing.change(phase=Phase.WAITING if idle else Phase.COMPUTING)
        self.lateness.record_done(self._standing.now)
        self._looked_in = -1
        if not self._standing.acts:
            self._standing.tell()

    def choose_task(
        self, owners: Sequence[WorkerId], view: View, computed: Container[int]
    ) -> int | None:
        """Choose a task of a late member to copy that this worker has not computed yet."""
        if not self.late:
            return None
        tasks = choose_copies(owners, view.paths, self.late, self._standing.me)
        return next((vrank for vrank in tasks if vrank not in computed), None)

    def look(self, *, counts: bool, synced: bool) -> None:
        """Look for late members, or report that some are late, once it is time."""
        standing = self._standing
        if standing.now >= self.look_at(counts=counts, synced=synced):
            self._looked_in = standing.status.committed
            standing.order(effects.LookWhoIsLate(standing.status.view, standing.status.committed))
        if standing.now >= self.late_at(counts=counts):
            standing.change(phase=Phase.OVERDUE)
            standing.tell()

    def look_again(self) -> None:
        """Look for members that are late in the step under way, though that was done before."""
        self._looked_in = -1

    def late_at(self, *, counts: bool) -> float:
        """Return the time at which it reports late members, if no event arrives before."""
        waits = self._standing.status.phase is Phase.WAITING and counts
        return self.lateness.late_at if waits else FOREVER

    def look_at(self, *, counts: bool, synced: bool) -> float:
        """Return the time at which it looks for late members; `synced`: members take steps."""
        waits = self._standing.status.waiting and counts and synced
        return self.lateness.copy_at if waits and self._looked_in < 0 else FOREVER
