"""Defines the status by which a worker describes itself to the control plane. Pure.

A status is level-triggered: it carries the whole state of its sender, never a change alone. So a
lost, repeated or late status does no harm, and `seq` shows which of two is older.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.types import NO_VIEW, Incarnation, ViewNumber, WorkerId


class Stage(enum.Enum):
    """Names the stages in the life of a worker's process."""

    #: It has started; its script has not asked for steps yet.
    BOOTING = "booting"
    #: It wants to be a member of views, or is one.
    READY = "ready"
    #: It has ended by itself with exit code 0.
    EXITED = "exited"
    #: The user's script has raised an error, which is a bug and no fault of a machine.
    FAILED = "failed"
    #: It was killed or fenced, or it crashed: a fault of a machine.
    LOST = "lost"

    @property
    def alive(self) -> bool:
        return self in (Stage.BOOTING, Stage.READY)


class ReplicaStage(enum.Enum):
    """Names the stages of a replica, a worker's copy of the job's state: see docs/glossary.md.

    A replica that is catching up is CURRENT as of its `committed` steps, and lacks later ones.
    """

    #: The process has the state that its script has made, without any of the job's.
    ABSENT = "initial"
    #: A load has begun and is not verified: the state is neither the initial one nor the job's.
    OBTAINING = "dirty"
    #: The job's state after `committed` steps.
    CURRENT = "current"
    #: It was the job's state, but something wrong may have been used to make it.
    DISTRUSTED = "discarded"


class Phase(enum.Enum):
    """Names the places where a worker's script may be in a step."""

    #: The script runs its own code: before, between or after steps.
    SCRIPT = "script"
    #: The script is held between two steps, and its state is at rest.
    BOUNDARY = "boundary"
    #: The script computes its tasks of the step.
    COMPUTING = "computing"
    #: Its tasks of the step are done, and it waits for other members.
    WAITING = "waiting"
    #: It has waited for other members for longer than steps take.
    OVERDUE = "overdue"
    #: It has left its loop; other workers or a save still need this process.
    LEAVING = "leaving"
    #: Its loop has run all its steps.
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Describes an event that a worker adds to the job's log."""

    #: The number grows within a worker.
    number: int
    kind: str
    text: str
    #: The worker that the event is about, if it is not the reporter.
    about: WorkerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Describes one incarnation of a worker to the control plane."""

    worker: WorkerId
    incarnation: Incarnation
    #: The number of the status; a greater one is newer.
    seq: int = 0
    stage: Stage = Stage.BOOTING
    #: The newest view that it has installed.
    view: ViewNumber = NO_VIEW
    #: The heart of every view change: the worker will never again act in a view with this number
    #: or a smaller one, so its `committed` and `reduced` only change in a later view.
    promised: ViewNumber = NO_VIEW
    state: ReplicaStage = ReplicaStage.ABSENT
    #: The number of steps that it has committed; also the index of the next step.
    committed: int = 0
    #: It holds the complete reduced gradient of step `committed`.
    reduced: bool = False
    #: Its virtual ranks in step `committed`.
    hosted: tuple[int, ...] = ()
    phase: Phase = Phase.SCRIPT
    #: The number of step loops that its script has entered.
    loop: int = 0
    #: The number of steps that its loop has opened, the newest one included.
    opened: int = 0
    #: The line of its script that opened its step or ended its loop, for people.
    line: str = ""
    #: The members of `view` that the network does not reach.
    unreached: tuple[WorkerId, ...] = ()
    #: The reason for which it has left `view` without an order, as a phrase that follows its name.
    left_for: str = ""
    #: Every member of `view` has acted in it since this time of its node's clock.
    proved_at: float = 0.0
    #: The step of the newest checkpoint that it knows to be durable.
    saved: int = 0
    #: The step of a checkpoint that it could not read.
    unreadable: int = 0
    #: The newest view whose state could not be recalled from the nodes' memory.
    unrecalled: ViewNumber = NO_VIEW
    #: The invalidations that it knows.
    invalidations: tuple[Invalidation, ...] = ()
    #: Its newest events for the job's log, at most JOB_EVENTS_MAX.
    events: tuple[JobEvent, ...] = ()
    #: The reason of its loss, or the traceback of its failure.
    detail: str = ""
    #: In a group: how often its node has seen the process at work.
    activity: int = 0
    pid: int = 0
    #: The address where it can be fed, before it is a member.
    address: str = ""
    #: The rendezvous address, HOST:PORT, where its processes on further nodes find it.
    meets_at: str = ""
    #: The number of this node among the worker's nodes. Each node reports its own processes.
    place: int = 0
    #: The step at which its view has ended, while its share of that state is saved.
    saving: int = 0
    #: The number of the newest FollowOrder that it has completed: it has caught up.
    abreast: int = 0
    #: It has joined, and none of its tasks has been committed yet.
    unproven: bool = False
    #: The number of the newest FollowOrder that failed on this worker.
    unfed: int = 0
    #: The addresses of the servers, and of their heirs, that have all of a new share.
    heirs: tuple[str, ...] = ()
    #: The newest layout of servers that it uses, to which `heirs` belongs.
    layout: ServerLayout | None = None
    #: The error of its own machine by which the process has ended.
    machine_error: MachineError | None = None
    #: Its ledger cannot grow: it rests at a boundary until there is room.
    no_room: bool = False

    @property
    def has_state(self) -> bool:
        """Return whether it holds the job's state after `committed` steps."""
        return self.state is ReplicaStage.CURRENT

    @property
    def dirty(self) -> bool:
        """Return whether its state is neither the initial one nor the job's."""
        return self.state in (ReplicaStage.OBTAINING, ReplicaStage.DISTRUSTED)

    @property
    def discarded(self) -> bool:
        """Return whether it has given its state up because something wrong was used."""
        return self.state is ReplicaStage.DISTRUSTED

    @property
    def has_stopped(self) -> bool:
        """Return whether it acts in no view now: it commits no step before the next view."""
        return self.promised >= self.view

    @property
    def at_boundary(self) -> bool:
        """Return whether it rests between two steps and acts in no view: it can donate state."""
        return self.phase is Phase.BOUNDARY and self.has_stopped and self.has_state

    @property
    def in_step(self) -> bool:
        """Return whether its script is in the middle of a step."""
        return self.phase in (Phase.COMPUTING, Phase.WAITING, Phase.OVERDUE)

    @property
    def waiting(self) -> bool:
        """Return whether its own tasks of the step are done, and it waits for other members."""
        return self.phase in (Phase.WAITING, Phase.OVERDUE)

    @property
    def late(self) -> bool:
        """Return whether it has waited for other members for longer than steps take."""
        return self.phase is Phase.OVERDUE

    @property
    def ended(self) -> bool:
        """Return whether its current loop has run all its steps."""
        return self.phase is Phase.ENDED

    @property
    def has_left_loop(self) -> bool:
        """Return whether its script takes no further step in its current loop."""
        return self.phase in (Phase.LEAVING, Phase.ENDED)
