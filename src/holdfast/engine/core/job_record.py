"""Defines the record of a job that its coordinator keeps in the journal, as values. Pure.

A coordinator that starts again begins with this record. It also continues to count setbacks, so
that a job which makes no progress ends after the same number of attempts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from holdfast.engine.core.hosted_service import ServerLayout, ServerPlace
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.types import (
    NO_VIEW,
    AgentId,
    Incarnation,
    ProcessRole,
    ViewNumber,
    WorkerId,
)
from holdfast.engine.core.views import View

CAUSE_CHARS_MAX = 1000
CAUSES_MAX = 16  # the newest are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Records a worker's place on a node, and the newest incarnation that was ordered for it."""

    worker: WorkerId
    agent: AgentId
    incarnation: Incarnation
    role: ProcessRole = ProcessRole.WORKER
    #: The other nodes of a worker that is spread over several; `agent` is the first.
    further: tuple[AgentId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderEnd:
    """Records that the script of a leader has ended: all scripts must end after the same step."""

    worker: WorkerId
    view: ViewNumber
    loop: int
    committed: int
    line: str = ""
    #: Its last status has arrived, so `committed` is its last step.
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeFalls:
    """Counts how often the job began again from one step for one reason."""

    step: int
    cause: str
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setbacks:
    """Counts the setbacks of a job since it reached its furthest step."""

    furthest: int = 0
    #: How often the job began again after workers were lost.
    falls: int = 0
    #: How often the job went back because workers had different results.
    retreats: int = 0
    #: How often all members of a view waited for each other.
    standstills: int = 0
    #: The reasons for which the job began again; only reasons of the workers' own count.
    alike: tuple[AlikeFalls, ...] = ()
    #: The newest reason since the job began, or began again.
    cause: str = ""

    @property
    def has_any(self) -> bool:
        """Return whether anything was counted."""
        return self != Setbacks(furthest=self.furthest)

    def blame(self, cause: str) -> Setbacks:
        """Return these with a newer reason, or unchanged if it is empty."""
        return dataclasses.replace(self, cause=cause[:CAUSE_CHARS_MAX]) if cause else self

    def fall(self, step: int, *, lost: bool) -> Setbacks:
        """Count that the job begins again from this step; `lost`: workers were lost before."""
        alike = {(each.step, each.cause): each for each in self.alike}
        if self.cause:
            now = AlikeFalls(step=step, cause=self.cause)
            before = alike.pop((step, self.cause), None)
            times = before.times + 1 if before is not None else 1
            alike[step, self.cause] = dataclasses.replace(now, times=times)
        newest = tuple(alike.values())[-CAUSES_MAX:]
        return dataclasses.replace(self, falls=self.falls + lost, alike=newest, cause="")

    def go_back(self) -> Setbacks:
        """Count a retreat."""
        return dataclasses.replace(self, retreats=self.retreats + 1)

    def stand_still(self) -> Setbacks:
        """Count a standstill."""
        return dataclasses.replace(self, standstills=self.standstills + 1)


NO_SETBACKS = Setbacks()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Keeps the facts that a coordinator must never forget: written before any node knows them."""

    term: int
    view: View | None = None
    #: No number up to this may be given to another view.
    views_used: ViewNumber = NO_VIEW
    slots: tuple[Slot, ...] = ()
    #: The ids below this have been given to slots.
    workers_named: int = 0
    #: The number grows with each record that is lost; other numbers continue from it.
    forgotten: int = 0
    release_loop: int = 0
    #: The steps of checkpoints from which the job can begin.
    saved: tuple[int, ...] = ()
    #: All servers of the hosted service.
    servers: tuple[ServerPlace, ...] = ()
    invalidations: tuple[Invalidation, ...] = ()
    #: None while the job runs, "" after success, else the reason of its failure.
    outcome: str | None = None
    #: None: the layout with which the job began.
    layout: ServerLayout | None = None
    setbacks: Setbacks = NO_SETBACKS
    #: The first leader whose script has ended, while scripts of other workers have not.
    ended: LeaderEnd | None = None
