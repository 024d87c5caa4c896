"""Keeps an agent's record of one process of its node, and judges its end and its statuses. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from holdfast.engine.core.directives import Directive, WorkerDirective
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.engine.core.types import NO_VIEW, ProcessRole, WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus

QUIT = (
    "the script ended its process with exit status 0 before its last line: by os._exit, or a "
    "library that calls it"
)
_TOLD = attrgetter("late", "ended", "at_boundary")  # news in a phase; the rest is mere progress


@dataclass(slots=True)
class NodeProcess:
    """Keeps the state of one process, of any role."""

    status: WorkerStatus
    detector: FreezeDetector
    role: ProcessRole
    #: It runs until ProcessExited.
    running: bool = True
    paused: bool = False
    told: WorkerDirective | None = None
    killed_for: str = ""
    #: The time at which it is killed if it has not ended on request.
    kill_at: float | None = None

    @property
    def runs_group_script(self) -> bool:
        """Return whether a script for torchrun has begun here, if the job is of such scripts."""
        return self.role is ProcessRole.WORKER and self.status.view != NO_VIEW

    def end_pause(self, policy: FreezePolicy) -> None:
        """Record that it runs again; samples from before the pause do not count."""
        self.paused = False
        self.detector = FreezeDetector(policy, joined=self.detector.joined)

    def record_end(self, code: int, told: str, error: MachineError | None, reported: bool) -> None:
        """Record its end; `told`, `error` and `reported` go to `judge_end`."""
        # It may have given a reason before; what the kernel has done to it counts more.
        own_words = self.status.detail if code < 0 and error is None else ""
        end = judge_end(code, own_words or told, error, reported, self.killed_for)
        self.running = False
        self.status = dataclasses.replace(
            self.status,
            stage=end.stage,
            detail=end.reason,
            machine_error=end.error,
            seq=self.status.seq + 1,
        )


def directive_for_worker(directive: Directive, until: float) -> WorkerDirective:
    """Return the part of an agent's directive for its workers, which may act `until` then."""
    return WorkerDirective(
        stop_view=directive.stop_view,
        pending_view=directive.pending_view,
        pending_save=directive.pending_save,
        view=directive.view,
        release_loop=directive.release_loop,
        save_wanted=directive.save_wanted,
        follow=directive.follow,
        servers=directive.servers,
        layout=directive.layout,
        acting_until=until,
    )


def list_running(processes: Mapping[WorkerId, NodeProcess]) -> list[WorkerId]:
    return [worker for worker, process in processes.items() if process.running]


def has_whole_view(directive: Directive | None, here: Mapping[WorkerId, NodeProcess]) -> bool:
    """Return whether all members of the view run here and act in it, as reported so far.

    A member that runs on other nodes as well does not: the coordinator may have given those nodes
    up.
    """
    view = directive.view if directive else None
    if view is None:
        return False
    for member in view.members:
        process = here.get(member.worker)
        if process is None or process.status.incarnation != member.incarnation:
            return False
        if not process.running or process.paused or process.killed_for:
            return False
        if member.further or process.status.promised >= view.number:
            return False
    return True


@dataclass(frozen=True, slots=True)
class EndVerdict:
    """Names the stage that a process has reached, the reason, and its machine's own error."""

    stage: Stage
    reason: str
    error: MachineError | None = None


def judge_end(
    code: int, told: str, error: MachineError | None, reported: bool, killed_for: str
) -> EndVerdict:
    """Judge the end of a process with this exit status, negative for a signal.

    `told`: the reason that it gave. `error`: its machine's own error, if that is known. `reported`:
    its script had reported its end. `killed_for`: why the agent has killed it, if it has.

    A process that ends without a report is lost whatever its status: its Python may not have
    started, or some code has called `os._exit`.
    """
    if killed_for:
        return EndVerdict(Stage.LOST, killed_for)
    if code == 0:
        return EndVerdict(Stage.EXITED, told) if reported else EndVerdict(Stage.LOST, QUIT)
    if code < 0:
        return EndVerdict(Stage.LOST, told or f"ended by signal {-code}", error)
    why = told or f"exit code {code}"
    if error is None and (told or reported):
        return EndVerdict(Stage.FAILED, why)
    return EndVerdict(Stage.LOST, why, error or MachineError.UNREPORTED)


def is_urgent(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Return whether a status brings more than progress within a step or a view."""
    quiet = dataclasses.replace(
        new,
        seq=old.seq,
        committed=old.committed,
        phase=old.phase,
        proved_at=old.proved_at,
        activity=old.activity,
    )
    return quiet != old or _TOLD(new) != _TOLD(old)
