"""Defines the events and effects of the coordinator machine, as values."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.directives import SIGTERM, AgentReport, Directive
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.roster import NodeSnapshot
from holdfast.engine.core.types import AgentId, Tick, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ReportArrived:
    """An agent has reported the state of its node."""

    report: AgentReport


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The job should end, as its operator wants; asked again, at once.

    `saves`: it keeps checkpoints, so one is made before. `signal`: number of the signal by which
    scripts for torchrun are asked to end.
    """

    reason: str
    saves: bool = False
    signal: int = SIGTERM


@dataclass(frozen=True, slots=True)
class ServersAsked:
    """An operator wants the hosted service to be on `count` servers."""

    count: int


CoordinatorEvent = ReportArrived | StopRequested | ServersAsked | Tick

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Write this record; it must be durable before any later effect is carried out."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class SendDirective:
    """Send an agent its node's orders."""

    directive: Directive


@dataclass(frozen=True, slots=True)
class Cost:
    """Describes the cost of an incident until the first step that was committed afterwards."""

    #: The time from the first sign of the fault until the commit was reported.
    pause_s: float
    #: The tasks of workers that were left out, which are computed again.
    tasks: int
    #: The committed steps that are computed again.
    steps: int
    #: The workers by which there are fewer than before.
    missing: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Write one line of the job's event log, for people and for events.jsonl.

    `id` and `causes`, ids of earlier lines, are added last (core/membership/event_log.py). Of a
    view: `members` are its workers, and `again` means that it repeats committed steps.
    """

    kind: str
    text: str
    worker: WorkerId | None = None
    view: ViewNumber | None = None
    step: int | None = None
    node: AgentId | None = None
    id: str = ""
    causes: tuple[str, ...] = ()
    cost: Cost | None = None
    members: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """End the coordinator: the job is over and no part of it runs. Empty outcome: success."""

    outcome: str


CoordinatorEffect = Persist | SendDirective | Announce | Finish

# ---------------------------------------------------------------- what is seen of it


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSnapshot:
    """Describes what the coordinator knows, for people and for tests."""

    record: JobRecord
    step: int
    stop_view: ViewNumber
    pending_view: ViewNumber
    agents: tuple[NodeSnapshot, ...]
    workers: tuple[WorkerStatus, ...]
    finished: bool
    #: The nodes that may leave with their pieces of the state.
    freed: tuple[AgentId, ...] = ()
