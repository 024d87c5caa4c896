"""Decides for one node: its workers, their processes, and the lease that lets them act.

It does not know sockets, process handles or clocks. The invariants it keeps: at most one process of
a worker lives at a time; a worker is reported lost only after its process has ended; a worker whose
right to act has run out (core/membership/lease.py) is paused at once, and resumed only if the
coordinator still wants it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from holdfast.engine.core.directives import AgentReport, Directive, Move, WorkerDirective
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import assert_never, require
from holdfast.engine.core.hosted_service import RunningServer
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.departure import Departure, MoveOrders, OwnJob
from holdfast.engine.core.membership.lease import CoordinatorContact
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy, ProcessSample
from holdfast.engine.core.membership.node_process import (
    NodeProcess,
    directive_for_worker,
    has_whole_view,
    is_urgent,
    list_running,
)
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.core.types import NO_VIEW, AgentId, Incarnation, ProcessRole, Tick, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    heartbeat_s: float = 0.5
    lease: LeasePolicy = field(default_factory=LeasePolicy)
    freeze: FreezePolicy = field(default_factory=FreezePolicy)
    #: The number of slots among them for workers that are held back.
    spares: int = 0
    # From the signal that asks a script for torchrun to end to its kill. 0: it is killed at once.
    end_s: float = 0.0


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class DirectiveArrived:
    directive: Directive


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process has been started; its further ones, on other nodes, find it at `meets_at`."""

    worker: WorkerId
    incarnation: Incarnation
    pid: int
    meets_at: str = ""


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The process has ended. `code` is as Python gives it: negative for a signal.

    `reported`: its script had reported its end before. `error`: its machine's own error, as the
    process has reported or the agent has found out.
    """

    worker: WorkerId
    incarnation: Incarnation
    code: int
    detail: str = ""
    reported: bool = False
    error: MachineError | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    worker: WorkerId
    incarnation: Incarnation
    sample: ProcessSample


@dataclass(frozen=True, slots=True)
class CoordinatorReached:
    """A coordinator can be reached (again): it should receive a report, if it is our job's.

    `job`: the coordinator's job, as it has proved.
    """

    job: str = ""


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is over, by the record that it left; there may be no coordinator any more."""


@dataclass(frozen=True, slots=True)
class Drained:
    """This node should be drained, for that reason; if it is empty, the node may be used again."""

    reason: str
    #: The check that failed; empty if a person or a manager asks for it.
    failing: str = ""
    #: The node leaves for good: its agent quits once no process runs here.
    leave: bool = False
    #: The node is gone after this time.
    deadline_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class MoveAsked:
    """A worker of this node is to be moved to another one."""

    leaving: Move


@dataclass(frozen=True, slots=True)
class Labelled:
    """This node is in these failure domains."""

    domains: Domains


@dataclass(frozen=True, slots=True)
class MemoryHeld:
    """These pieces of the job's state are in the node's memory, and are served at `address`.

    `size`: how many bytes they take.
    """

    kept: tuple[KeptPieces, ...]
    address: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class ServersRun:
    """Reports the servers that listen on this node."""

    servers: tuple[RunningServer, ...]


AgentEvent = (
    DirectiveArrived
    | WorkerSaid
    | Spawned
    | ProcessExited
    | Sampled
    | CoordinatorReached
    | JobOver
    | Drained
    | MoveAsked
    | Labelled
    | MemoryHeld
    | ServersRun
    | Tick
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SendReport:
    report: AgentReport


@dataclass(frozen=True, slots=True)
class SendWorker:
    worker: WorkerId
    incarnation: Incarnation
    directive: WorkerDirective


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process in its role; Spawned or ProcessExited must follow.

    `place`: on which of the worker's nodes this is; not the first: it joins that one's process.
    """

    worker: WorkerId
    incarnation: Incarnation
    role: ProcessRole = ProcessRole.WORKER
    place: int = 0
    meets_at: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process and everything it started; ProcessExited must follow."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class AskToEnd:
    """Send the process this signal, so that its script can save; ProcessExited or Kill follows."""

    worker: WorkerId
    incarnation: Incarnation
    signal: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop the process and everything it started with SIGSTOP: no part of it may run."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue a paused process."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Quit:
    """End the agent: every worker has ended, and no work is left here.

    `problem`: the reason to end before the job is over; empty if the job is over, or continues
    without this node.
    """

    problem: str = ""


AgentEffect = SendReport | SendWorker | Spawn | Kill | AskToEnd | Pause | Resume | Quit


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSnapshot:
    agent: AgentId
    incarnation: Incarnation
    paused: tuple[WorkerId, ...]
    report: AgentReport


class AgentMachine:
    """Decides for one node, as the module describes; `handle` is the only mutator."""

    def __init__(
        self,
        agent: AgentId,
        incarnation: Incarnation,
        slots: int,
        policy: AgentPolicy,
        pid: int = 0,
        job: str = "",
    ) -> None:
        """Make the machine of a node of `job`; empty: of the first job that it meets."""
        self._plain = AgentReport(  # what changes seldom
            agent=agent,
            incarnation=incarnation,
            seq=0,
            slots=slots,
            spares=policy.spares,
            pid=pid,
        )
        self._job = OwnJob(job)
        self._policy = policy
        self._departure = Departure()
        self._moves = MoveOrders()
        self._now = 0.0
        self._processes: dict[WorkerId, NodeProcess] = {}
        self._directive: Directive | None = None
        self._seq = 0
        self._contact = CoordinatorContact(policy.lease)
        self._fence_at = float("inf")
        self._next_report = float("-inf")

    def handle(self, event: AgentEvent, now: float) -> list[AgentEffect]:
        """Apply one event at time `now` (seconds); return effects in order."""
        effects: list[AgentEffect] = []
        urgent, self._now = False, now
        match event:
            case DirectiveArrived(directive):
                effects += self._handle_directive(directive, now)
            case WorkerSaid(status):
                urgent = self._handle_status(status)
            case Spawned(worker, incarnation, pid, meets_at):
                process = self._find_current(worker, incarnation)
                if process is not None:
                    meets_at = meets_at or process.status.meets_at
                    process.status = dataclasses.replace(process.status, pid=pid, meets_at=meets_at)
                    urgent = True
            case ProcessExited():
                urgent = self._handle_exit(event)
                effects += self._reconcile(now)
            case Sampled(worker, incarnation, sample):
                effects += self._handle_sample(worker, incarnation, sample)
            case CoordinatorReached(job):
                urgent = self._job.meet(job)
                effects += [] if urgent else self._end_all("another job is where ours was")
            case JobOver():
                self._job.ended = True
                effects += self._end_all("the job is over")
            case Drained(reason, failing, leave, deadline_s):
                by, report = now + deadline_s, self._seq + 1
                urgent = self._departure.ask(reason, failing, leave, by, report)
            case MoveAsked(leaving):
                if (process := self._processes.get(leaving.worker)) is not None:
                    urgent = self._moves.ask(leaving, process.status.incarnation)
            case Labelled(domains):
                urgent = self._change(domains=domains)
            case MemoryHeld():
                kept, size = event.kept, event.size
                self._change(kept=kept, pieces_at=event.address, pieces_bytes=size)
                self._departure.keep(kept, self._seq + 1)
            case ServersRun(servers):
                urgent = self._change(servers=servers)
            case Tick():
                pass
            case _:
                assert_never(event)
        effects += self._fence(now)
        alone = self._contact.is_abandoned(now)
        may_end = self._departure.may_end(self._plain.agent, self._directive, now, alone=alone)
        is_idle = not any(process.running for process in self._processes.values())
        over = is_idle and (self._job.is_gone or may_end)
        due = urgent or over or now >= self._next_report
        if due and not self._job.is_gone:
            effects.append(self._report(now))
        return [*effects, Quit(self._job.problem)] if over else effects

    def deadline(self) -> float | None:
        if self._job.is_gone:  # only the ends of its processes are waited for
            return None
        return min(self._next_report, self._fence_at)

    def snapshot(self) -> AgentSnapshot:
        return AgentSnapshot(
            agent=self._plain.agent,
            incarnation=self._plain.incarnation,
            paused=tuple(w for w, p in sorted(self._processes.items()) if p.paused),
            report=self._make_report(),
        )

    def check(self) -> None:
        for worker, process in self._processes.items():
            require(process.status.worker == worker, f"worker {worker} holds another's status")
        self._contact.check()

    # ------------------------------------------------------------ directives

    def _handle_directive(self, directive: Directive, now: float) -> list[AgentEffect]:
        old = self._directive
        addressee = directive.agent, directive.agent_incarnation
        if (
            addressee != (self._plain.agent, self._plain.incarnation) or self._job.is_gone
        ):  # another job's
            return []
        if old is not None and (directive.term, directive.seq) <= (old.term, old.seq):
            return []
        if directive.view is None and old is not None:
            directive = dataclasses.replace(directive, view=old.view)
        if directive.undecided and old is not None:
            directive = dataclasses.replace(directive, wanted=old.wanted, follow=old.follow)
        self._directive = directive
        self._contact.record_answer(directive.heard)
        return self._reconcile(now)

    def _reconcile(self, now: float) -> list[AgentEffect]:
        """Kill unwanted processes; start wanted ones, once their older processes have ended.

        No process starts while there is no room next to processes that have yet to end. Without a
        lease none starts either: no agent would ever fence it.
        """
        directive = self._directive
        if directive is None:
            return []
        wanted = {each.worker: (each.incarnation, each.role) for each in directive.wanted}
        effects: list[AgentEffect] = []
        for worker, process in self._processes.items():
            present = (process.status.incarnation, process.role)
            if process.running and wanted.get(worker) != present:
                effects += self._end(worker, "the coordinator replaced it", directive.end_signal)
        for each in directive.wanted if self._contact.has_lease(now) else ():
            worker, incarnation = each.worker, each.incarnation
            old = self._processes.get(worker)
            if old is not None and (old.running or old.status.incarnation >= incarnation):
                continue
            if sum(p.running for p in self._processes.values()) >= self._plain.slots:
                continue
            status = WorkerStatus(
                worker=worker, incarnation=incarnation, place=each.place, meets_at=each.meets_at
            )
            detector = FreezeDetector(self._policy.freeze, joined=False)
            self._processes[worker] = NodeProcess(status=status, detector=detector, role=each.role)
            effects.append(Spawn(worker, incarnation, each.role, each.place, each.meets_at))
        return effects

    def _forward(self, worker: WorkerId, process: NodeProcess, until: float) -> list[AgentEffect]:
        directive = self._directive
        # A process on a further node gets its orders from its worker's first process.
        if directive is None or process.status.place:
            return []
        told = directive_for_worker(directive, until)
        old = process.told
        if old is not None and dataclasses.replace(told, acting_until=old.acting_until) == old:
            gained_s = told.acting_until - old.acting_until
            if gained_s < self._policy.lease.lease_s / 8:  # not worth a message yet
                return []
        process.told = told
        if old is not None and old.view is told.view:
            told = dataclasses.replace(told, view=None)  # the worker has it, and views can be large
        return [SendWorker(worker, process.status.incarnation, told)]

    # ------------------------------------------------------------ workers

    def _handle_status(self, status: WorkerStatus) -> bool:
        """Take in a status; return whether to report it before the next heartbeat."""
        process = self._find_current(status.worker, status.incarnation)
        if process is None or not process.status.stage.alive or status.seq <= process.status.seq:
            return False
        old = process.status
        if status.detail:  # its last words: no view may count on it any more
            process.status = dataclasses.replace(old, seq=status.seq, detail=status.detail)
            return False
        status = dataclasses.replace(status, pid=old.pid, place=old.place, meets_at=old.meets_at)
        process.status = status
        process.detector.joined = True
        return is_urgent(old, status)

    def _handle_sample(
        self, worker: WorkerId, incarnation: Incarnation, sample: ProcessSample
    ) -> list[AgentEffect]:
        process = self._find_current(worker, incarnation)
        if process is None or not process.running or process.paused:
            return []
        reason = process.detector.observe(sample)
        return self._kill(worker, reason) if reason is not None else []

    def _handle_exit(self, event: ProcessExited) -> bool:
        process = self._find_current(event.worker, event.incarnation)
        if process is None:
            return False
        process.record_end(event.code, event.detail, event.error, event.reported)
        return True

    def _end_all(self, reason: str) -> list[AgentEffect]:
        """End all workers, since their job is gone."""
        self._directive = None
        return [
            effect
            for worker in list_running(self._processes)
            for effect in self._kill(worker, reason)
        ]

    def _end(self, worker: WorkerId, reason: str, number: int) -> list[AgentEffect]:
        """End a process that may act: ask the script of a group to end, and kill any other one."""
        process = self._processes[worker]
        if process.killed_for:
            return []
        if not process.runs_group_script or process.paused or not self._policy.end_s:
            return self._kill(worker, reason)
        process.killed_for, process.kill_at = reason, self._now + self._policy.end_s
        return [AskToEnd(worker, process.status.incarnation, number)]

    def _kill(self, worker: WorkerId, reason: str) -> list[AgentEffect]:
        process = self._processes[worker]
        if process.killed_for and process.kill_at is None:
            return []
        process.killed_for, process.kill_at = process.killed_for or reason, None
        return [Kill(worker, process.status.incarnation, process.killed_for)]

    # ------------------------------------------------------------ time

    def _fence(self, now: float) -> list[AgentEffect]:
        """Pause workers that lost the right to act; resume wanted ones that have it back.

        Workers that may act get the newest directive. A worker whose state the coordinator has
        given up by now is of no use: its process is killed. All processes are killed once this node
        is taken away: the coordinator receives a report of their ends.
        """
        ends_at, effects = self._departure.ends_at, list[AgentEffect]()
        if now >= ends_at:
            self._fence_at = float("inf")
            gone = "its node is taken away"
            return [
                effect
                for worker in list_running(self._processes)
                for effect in self._kill(worker, gone)
            ]
        self._fence_at = ends_at
        alone = has_whole_view(self._directive, self._processes)
        undecided = self._directive is not None and self._directive.undecided
        for worker, process in self._processes.items():
            if process.running and process.kill_at is not None:
                # It was asked to end, and takes too long, or may not act any more.
                until = min(process.kill_at, self._acting_deadline(process, alone, now))
                if now >= until:
                    effects += self._kill(worker, process.killed_for)
                else:
                    self._fence_at = min(self._fence_at, until)
            if not process.running or process.killed_for:
                continue
            if self._contact.is_abandoned(now):
                effects += self._kill(worker, "no coordinator was heard for too long")
                continue
            until = self._acting_deadline(process, alone, now)
            incarnation = process.status.incarnation
            # A coordinator that still learns cannot know whether a later view was formed.
            if now >= until or (process.paused and undecided):
                until = (self._contact.answered_at or now) + self._policy.lease.abandon_s
                if not process.paused:
                    process.paused = True
                    effects.append(Pause(worker, incarnation))
            else:
                effects += self._forward(worker, process, until)
                if process.paused:
                    process.end_pause(self._policy.freeze)
                    effects.append(Resume(worker, incarnation))
            self._fence_at = min(self._fence_at, until)
        return effects

    def _acting_deadline(self, process: NodeProcess, alone: bool, now: float) -> float:
        proved_at = now if alone else process.status.proved_at
        return min(self._contact.acting_until(proved_at, now), self._departure.ends_at)

    def _report(self, now: float) -> SendReport:
        self._seq += 1
        self._next_report = now + self._policy.heartbeat_s
        self._contact.record_report(self._seq, now)
        return SendReport(self._make_report())

    def _make_report(self) -> AgentReport:
        directive = self._directive
        view = directive.view if directive else None
        forgotten = bool(directive and view and directive.view_number < view.number)
        return dataclasses.replace(
            self._plain,
            seq=self._seq,
            draining=self._departure.reason,
            failing=self._departure.failing,
            leaves_in_s=self._departure.remaining_s(self._now),
            leaving=self._moves.list_open(self._find_current),
            view_known=view.number if view else NO_VIEW,
            view=view if forgotten else None,
            release_loop=directive.release_loop if directive else 0,
            ending=directive is not None and directive.shutdown,
            workers=tuple(p.status for _, p in sorted(self._processes.items())),
        )

    def _change(self, **fields: object) -> bool:
        """Change fields of all later reports; return whether they differ."""
        before = self._plain
        self._plain = dataclasses.replace(before, **fields)  # type: ignore[arg-type]
        return self._plain != before

    def _find_current(self, worker: WorkerId, incarnation: Incarnation) -> NodeProcess | None:
        process = self._processes.get(worker)
        if process is None or process.status.incarnation != incarnation:
            return None
        return process
