"""Reports to people why a job's manager does not give some of its nodes, or has ended them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId

PATIENCE_S = 10.0  # a placement may wait this long without a word
AGAIN_S = 60.0  # between two reports whose reasons differ
RAN_MAX = 10_000  # placements whose end is looked for


class WaitingReport:
    """Makes one line once placements have waited for some time, and again as the reason changes.

    The reasons are the manager's own (`Placement.why`), each printed once, if it gives any. It also
    makes a line for a placement that ran and has ended for a reason.

    `manager`: its name for people.
    """

    def __init__(self, manager: str) -> None:
        self._manager = manager
        self._since: float | None = None  # when the oldest placement that waits was first listed
        self._quiet_until = float("-inf")
        self._last = ""
        self._ran: dict[PlacementId, None] = {}  # the newest placements whose end has no reason yet
        self.current = ""  # the line as of the last listing, whether it is due again or not

    def read(self, placements: Sequence[Placement], now: float) -> Iterator[str]:
        """Take in a listing, and yield the lines that are due."""
        yield from self._read_ended(placements)
        waiting = [each for each in placements if each.holding is Holding.WAITING]
        if not waiting:
            self._since, self._last, self._quiet_until = None, "", float("-inf")
            self.current = ""
            return
        self._since = now if self._since is None else self._since
        reasons = dict.fromkeys(each.why for each in waiting if each.why)
        given = sum(each.holding is Holding.RUNNING for each in placements)
        count = f"{self._manager} gives {given} of {given + len(waiting)} nodes"
        line = "; ".join((count, *reasons))
        if now < self._since + PATIENCE_S:
            return
        self.current = line
        if now >= self._quiet_until and line != self._last:
            self._last, self._quiet_until = line, now + AGAIN_S
            yield line

    def _read_ended(self, placements: Sequence[Placement]) -> Iterator[str]:
        """Yield a line for each placement that has ended, once the manager gives a reason.

        A manager may know the reason later than the end.
        """
        for each in placements:
            if each.holding is Holding.ENDED and each.why and each.id in self._ran:
                del self._ran[each.id]
                yield f"{each.id} has ended on {each.host}: {each.why}"
            elif each.holding is Holding.RUNNING:
                self._ran[each.id] = None
        for old in list(self._ran)[:-RAN_MAX]:
            del self._ran[old]
