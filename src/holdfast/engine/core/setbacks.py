"""Counts what keeps a job from coming further: values that the coordinator's journal keeps. Pure.

A coordinator that starts again continues to count, so that a job which cannot come further ends
after the same number of attempts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

CAUSE_CHARS_MAX = 1000
CAUSES_MAX = 16  # the newest are kept


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
    #: How often the job went back because workers came to different results.
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
        """Return these with a newer reason; an empty one changes nothing."""
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
