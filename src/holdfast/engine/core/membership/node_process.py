"""Keeps what an agent knows of one process of its node. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.engine.core.directives import Directive, WorkerDirective
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.engine.core.membership.process_ends import judge_end
from holdfast.engine.core.types import NO_VIEW, ProcessRole, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus


@dataclass(slots=True)
class NodeProcess:
    """Keeps the state of one process, of any role."""

    status: WorkerStatus
    detector: FreezeDetector
    role: ProcessRole
    running: bool = True  # until ProcessExited
    paused: bool = False
    told: WorkerDirective | None = None
    killed_for: str = ""
    kill_at: float | None = None  # when it is killed if it has not ended, as it was asked to

    @property
    def runs_group_script(self) -> bool:
        """Return whether a script for torchrun has begun here, if the job is of such scripts."""
        return self.role is ProcessRole.WORKER and self.status.view != NO_VIEW

    def end_pause(self, policy: FreezePolicy) -> None:
        """Record that it runs again; what was seen of it before the pause does not count."""
        self.paused = False
        self.detector = FreezeDetector(policy, joined=self.detector.joined)

    def record_end(self, code: int, told: str, error: MachineError | None, reported: bool) -> None:
        """Record its end; `told`, `error` and `reported` are those of process_ends.judge_end."""
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

    One that runs on other nodes as well does not: the coordinator may have given those up.
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
