"""Charges the incidents of a run for the time of workers that they have cost.

No time is charged to two of them.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.records.incidents import Incident

NEAR_S = 5.0  # a worker may notice a fault this long before, or after, the coordinator does


class Part(enum.Enum):
    """Names a part of the time of a run."""

    PRODUCTIVE = "productive"
    WAITING = "waiting"
    DATA = "data"
    STATES = "states"
    CHECKS = "checks"
    AGAIN = "again"
    LOST = "lost"
    SAVING = "saving"
    STALLED = "stalled"
    TRANSFER = "transfer"
    STARTING = "starting"
    SPARE = "spare"
    ENDING = "ending"
    DEGRADED = "degraded"


_WHILE_OPEN = frozenset((Part.STALLED, Part.AGAIN, Part.TRANSFER))
_UNTIL_BACK = frozenset((Part.DEGRADED, Part.STARTING, Part.TRANSFER))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Describes a stretch of a worker's time. `began`: seconds since the epoch."""

    worker: int
    began: float
    parts: Mapping[Part, float]
    step: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def ended(self) -> float:
        return self.began + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCost:
    """Describes the cost of an incident: seconds of workers by part."""

    incident: Incident
    parts: Mapping[Part, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def charge(incidents: Sequence[Incident], stretches: Sequence[Stretch]) -> list[IncidentCost]:
    """Return the cost of each incident. `stretches`: of each worker in order.

    The time in which a worker is replaced is charged to the last incident that names it, stalls
    and repeated tasks to the nearest one, and lost steps to the one that went back behind them.
    """
    accounts = _Accounts(incidents)
    for stretch in stretches:
        accounts.take(stretch)
    pairs = zip(incidents, accounts.parts, strict=True)
    return [IncidentCost(incident=incident, parts=parts) for incident, parts in pairs]


class _Accounts:
    """Keeps one account for each incident: `parts`, in the order of the incidents."""

    def __init__(self, incidents: Sequence[Incident]) -> None:
        self.parts: list[dict[Part, float]] = [{} for _ in incidents]
        self._incidents = incidents
        self._begins = [incident.began_at for incident in incidents]
        self._naming: dict[int, list[int]] = {}  # by worker: incidents that name it
        self._back: dict[int, int] = {}  # by worker: the last of them after which it worked
        for number, incident in enumerate(incidents):
            for worker in incident.workers:
                self._naming.setdefault(worker, []).append(number)

    def take(self, stretch: Stretch) -> None:
        """Charge one stretch of time."""
        last = self._find_last_naming(stretch)
        if last is not None and Part.PRODUCTIVE in stretch.parts:
            if stretch.began > self._incidents[last].ended_at:
                self._back[stretch.worker] = last
        if last is not None and self._back.get(stretch.worker) == last:
            last = None
        nearest = self._find_nearest(stretch)
        for part, seconds in stretch.parts.items():
            if part in _UNTIL_BACK and last is not None:
                self._charge(last, part, seconds)
            elif part in _WHILE_OPEN:
                self._charge(nearest, part, seconds)
            elif part is Part.LOST:
                self._charge(self._find_way_back(stretch), part, seconds)

    def _charge(self, number: int | None, part: Part, seconds: float) -> None:
        if number is not None:
            account = self.parts[number]
            account[part] = account.get(part, 0.0) + seconds

    def _find_last_naming(self, stretch: Stretch) -> int | None:
        """Return the last incident that names this worker and had begun by the stretch's end."""
        for number in reversed(self._naming.get(stretch.worker, ())):
            if self._begins[number] < stretch.ended:
                return number
        return None

    def _find_nearest(self, stretch: Stretch) -> int | None:
        after = bisect.bisect(self._begins, stretch.ended)
        best, distance = None, NEAR_S
        for number in range(max(after - 2, 0), min(after + 1, len(self._begins))):
            each = self._incidents[number]
            apart = max(each.began_at - stretch.ended, stretch.began - each.ended_at, 0.0)
            if apart <= distance:
                best, distance = number, apart
        return best

    def _find_way_back(self, stretch: Stretch) -> int | None:
        """Return the first incident after which the job went on before this stretch's step."""
        for number in range(len(self._incidents)):
            each = self._incidents[number]
            if each.ended_at > stretch.began and each.resumes_at < stretch.step:
                return number
        return None
