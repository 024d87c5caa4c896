"""Defines the verdicts of a step machine on the words of all members, as values."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class Agreed:
    """Reports that all members know what audits ask: steps may begin."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Reports that all members have decided to commit the step.

    `pending`: one knows of a planned change. `owners`: of the next step. `dropped`: the tasks of
    this worker do not count, and are not complete.
    """

    step: int
    pending: bool
    owners: tuple[WorkerId, ...]
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Doubted:
    """Reports that copies of the state may be wrong; `discarded`: those of the members, too."""

    invalidation: Invalidation
    discarded: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Reports that the exchange of the view cannot go on."""

    reason: str


Verdict = Agreed | Decided | Doubted | Failed
