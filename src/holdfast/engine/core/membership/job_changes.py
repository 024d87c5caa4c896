"""Names what decisions change about the job itself, besides its nodes and slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.membership.admission import Attendance
from holdfast.engine.core.membership.changes import Change
from holdfast.engine.core.membership.followers import Followers
from holdfast.engine.core.membership.group_faults import Trials
from holdfast.engine.core.membership.handover import Handover
from holdfast.engine.core.membership.last_saves import LastSaves
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.membership.reserve import Reserve
from holdfast.engine.core.membership.server_places import ServerPlaces
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus

Memory: TypeAlias = (
    Attendance | Followers | Handover | LastSaves | Protection | Reserve | ServerPlaces | Trials
)


@dataclass(frozen=True, slots=True)
class EndLearning:
    """Decide from now on: all parts of a lost record that the agents have are here."""


@dataclass(frozen=True, slots=True)
class EndJob:
    """End the job: for a reason, or with an empty outcome for success."""

    outcome: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep a value that later decisions need; it replaces the one of the same type."""

    memory: Memory


@dataclass(frozen=True, slots=True)
class Stir:
    """Count the job as moving: it does not hang."""


@dataclass(frozen=True, slots=True)
class CountStandstill:
    """Count that all members of a view waited for each other, for too long."""


@dataclass(frozen=True, slots=True)
class MarkTold:
    """Mark a worker's events up to this number as logged."""

    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class MarkJudged:
    """Count the workers that are accused by now of computing wrongly as quarantined."""


@dataclass(frozen=True, slots=True)
class StopView:
    """Stop the view: its members promise not to act in it any more."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Order the view's members to stop at the next boundary; `saved`: its state is saved."""

    view: ViewNumber
    saved: bool = False


@dataclass(frozen=True, slots=True)
class AwaitBeginners:
    """Record since when a view without the state of any worker is wanted. None: it is not."""

    since: float | None


@dataclass(frozen=True, slots=True)
class GoBack:
    """Begin again from a checkpoint because of these invalidations."""

    invalidations: Invalidations


@dataclass(frozen=True, slots=True)
class InstallView:
    """Make this the present view. `redone`: tasks computed again for suspended workers.

    `begins`: no worker holds the state, so the job begins with it, or begins again.
    """

    view: View
    redone: int = 0
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseLoop:
    """Release workers whose script has ended its loops up to this one."""

    loop: int
    leader: WorkerStatus


@dataclass(frozen=True, slots=True)
class AwaitGroup:
    """Count from now on for how long there is no group."""


CoordinatorChange: TypeAlias = (
    Change
    | EndLearning
    | EndJob
    | Remember
    | Stir
    | CountStandstill
    | MarkTold
    | MarkJudged
    | StopView
    | PlanChange
    | AwaitBeginners
    | GoBack
    | InstallView
    | ReleaseLoop
)
GroupChange: TypeAlias = Change | EndLearning | EndJob | Remember | InstallView | AwaitGroup
Plan = list[CoordinatorChange]
