"""Describes a running job as `holdfast status` shows it: one struct for all its readers.

The coordinator makes it from a snapshot of its machine, and sends it as JSON. Commands, fleets and
tests read it here, so that a field is named and typed in one place.
"""

from __future__ import annotations

import collections
import enum
import json
import os
from typing import Any

import msgspec

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.membership.coordinator_events import CoordinatorSnapshot
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.types import RELEASE_ALL, ProcessRole, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.state.store.regular_files import parse_json


class JobPhase(enum.Enum):
    """Names what a job as a whole is doing."""

    STARTING = "starting"  # no view has been formed yet
    TRAINING = "training"
    RECOVERING = "recovering"  # a view has ended, and the next one is not formed yet
    FINISHING = "finishing"  # every script may leave its last loop
    STOPPING = "stopping"  # the outcome is decided; processes are being ended
    OVER = "over"


class ProcessPhase(enum.Enum):
    """Names what a worker's process is doing, by its last report."""

    BOOTING = "booting"
    EXITED = "exited"
    FAILED = "failed"
    LOST = "lost"
    STORE = "store"  # serves torch.distributed's store to a group
    SPARE = "spare"
    SUSPENDED = "suspended"
    CHANGING_VIEW = "changing view"
    STOPPED = "stopped"
    JOINING = "joining"
    HOT_SPARE = "hot spare"
    ENDED = "ended"
    WAITING = "waiting"
    COMPUTING = "computing"

    @property
    def hosts(self) -> bool:
        """Return whether the process is a member of the view that hosts virtual ranks."""
        return self in HOSTS


HOSTS = (
    ProcessPhase.COMPUTING,
    ProcessPhase.WAITING,
    ProcessPhase.ENDED,
    ProcessPhase.CHANGING_VIEW,
    ProcessPhase.STOPPED,
    ProcessPhase.JOINING,
)


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the coordinator that answers."""

    pid: int
    term: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a node. A new coordinator knows some nodes by the last view only: no pid yet."""

    id: str
    incarnation: int | None = None
    #: The process id of its agent.
    pid: int | None = None
    silent: bool = False
    #: The reason why it is being drained, or "".
    draining: str = ""
    domains: tuple[str, ...] = ()
    #: The number of its workers that are members of the view.
    members: int = 0
    #: It leaves, and other nodes have yet to take over the pieces in its memory.
    needed: bool = False
    #: The size of the pieces of the job's state in its memory.
    pieces_bytes: int = 0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the process of a worker."""

    id: int
    pid: int = 0
    #: The node of the process.
    agent: str
    incarnation: int = 1
    state: ProcessPhase
    virtual_ranks: tuple[int, ...] = ()
    #: The number of steps that it has committed.
    step: int = 0
    detail: str = ""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a server of the hosted service that listens."""

    number: int
    #: The node of the process.
    agent: str
    pid: int
    address: str


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the copies of the job's state in the memory of nodes."""

    redundancy: str
    #: The newest step of which all nodes that keep pieces have theirs.
    step: int
    bytes: int


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a running job. `group`: its processes form a fixed torch.distributed group."""

    view: int = 0
    step: int = 0
    state: JobPhase = JobPhase.STARTING
    coordinator: CoordinatorStatus
    agents: tuple[NodeStatus, ...] = ()
    workers: tuple[ProcessStatus, ...] = ()
    leader: int | None = None
    group: bool = False
    #: None: the job keeps no pieces.
    memory: MemoryStatus | None = None
    #: The servers of the hosted service that listen.
    servers: tuple[ServerStatus, ...] = ()
    #: The number of servers that hold all contents together; 0: the job has none.
    servers_held: int = 0
    #: The number of servers that was ordered last.
    servers_wanted: int = 0
    #: The nodes that the cluster manager does not give yet, with its reasons.
    awaited: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as `holdfast status --json` prints it."""
        found: dict[str, Any] = parse_json(encode_status(self))
        return found

    def node(self, name: str) -> NodeStatus | None:
        """Return the node of this name, or None."""
        return next((node for node in self.agents if node.id == name), None)


def encode_status(status: JobStatus) -> str:
    """Encode a status as JSON."""
    return json.dumps(msgspec.to_builtins(status))


def parse_status(text: str) -> JobStatus:
    """Parse a coordinator's answer. WireError if it is not one of this version of Holdfast."""
    try:
        return msgspec.convert(parse_json(text), JobStatus)
    except ValueError as error:
        raise WireError(
            f"the coordinator's status cannot be read ({error}): install the same version of "
            "Holdfast here and on the coordinator's machine"
        ) from None


NO_ROOM = "waits for room in the run directory: free space there"


def make_status(snapshot: CoordinatorSnapshot, spec: JobSpec, awaited: str = "") -> JobStatus:
    """Describe the job for people and programs. The calling process is the coordinator.

    `awaited`: the nodes that the cluster manager does not give, as the job's fleet reports.
    """
    view, layout = snapshot.record.view, snapshot.record.layout
    return JobStatus(
        view=view.number if view else 0,
        step=snapshot.step,
        state=job_phase(snapshot),
        coordinator=CoordinatorStatus(pid=os.getpid(), term=snapshot.record.term),
        agents=nodes_of(snapshot),
        workers=processes_of(snapshot),
        leader=view.leader if view else None,
        group=spec.compat.enabled,
        memory=memory_of(snapshot, spec.redundancy()),
        servers=servers_of(snapshot),
        servers_held=layout.count if layout else spec.servers.count,
        servers_wanted=layout.goal if layout else spec.servers.count,
        awaited=awaited,
    )


def job_phase(snapshot: CoordinatorSnapshot) -> JobPhase:
    view = snapshot.record.view
    if snapshot.finished:
        return JobPhase.OVER
    if snapshot.record.outcome is not None:
        return JobPhase.STOPPING
    if view is None:
        return JobPhase.STARTING
    if snapshot.record.release_loop == RELEASE_ALL:
        return JobPhase.FINISHING
    return JobPhase.RECOVERING if snapshot.stop_view >= view.number else JobPhase.TRAINING


def memory_of(snapshot: CoordinatorSnapshot, redundancy: Redundancy) -> MemoryStatus | None:
    """Describe the pieces by the nodes' last reports; None if the job keeps none."""
    view = snapshot.record.view
    if not redundancy.data:
        return None
    number, ring = (view.number, view.ring) if view else (0, ())
    nodes = [node for node in snapshot.agents if node.agent in ring]
    ends = [max((k.end for k in n.kept if k.view == number), default=0) for n in nodes]
    return MemoryStatus(
        redundancy=str(redundancy),
        step=min(ends, default=0),
        bytes=sum(node.pieces_bytes for node in snapshot.agents),
    )


def nodes_of(snapshot: CoordinatorSnapshot) -> tuple[NodeStatus, ...]:
    """List nodes, including nodes of the view whose report a new coordinator still lacks."""
    view = snapshot.record.view
    stores = stores_of(snapshot)
    members = collections.Counter(
        name for m in (view.members if view else ()) if m.worker not in stores for name in m.nodes
    )
    heard = {node.agent: node for node in snapshot.agents}
    serving = {place.agent for place in snapshot.record.servers if not place.heir}
    found = []
    for name in sorted({*heard, *members}):
        node = heard.get(name)
        if node is None:
            found.append(NodeStatus(id=name, silent=True, members=members[name]))
            continue
        needs = name in serving or (bool(node.kept) and name not in snapshot.freed)
        found.append(
            NodeStatus(
                id=name,
                incarnation=node.incarnation,
                pid=node.pid,
                silent=node.silent,
                draining=node.draining,
                domains=tuple(node.domains),
                members=members[name],
                needed=bool(node.draining) and needs,
                pieces_bytes=node.pieces_bytes,
            )
        )
    return tuple(found)


def servers_of(snapshot: CoordinatorSnapshot) -> tuple[ServerStatus, ...]:
    """List the servers that listen, where they are to run."""
    placed = {each.number: each.agent for each in snapshot.record.servers if not each.heir}
    return tuple(
        ServerStatus(number=each.number, agent=node.agent, pid=each.pid, address=each.address)
        for node in snapshot.agents
        for each in node.servers
        if placed.get(each.number) == node.agent
    )


def stores_of(snapshot: CoordinatorSnapshot) -> set[WorkerId]:
    """Find the processes that serve torch.distributed's store to a group."""
    return {s.worker for s in snapshot.record.slots if s.role is ProcessRole.STORE}


def processes_of(snapshot: CoordinatorSnapshot) -> tuple[ProcessStatus, ...]:
    view = snapshot.record.view
    hosted = view.list_hosted() if view else {}
    nodes = {slot.worker: slot.agent for slot in snapshot.record.slots}
    stores = stores_of(snapshot)
    heard = {node.agent for node in snapshot.agents if not node.silent}
    found = []
    for status in snapshot.workers:
        member = view is not None and view.includes(status.worker, status.incarnation)
        agreed = view is not None and status.view == view.number  # the worker knows best
        serves = status.worker in stores and status.stage is Stage.READY
        vranks = status.hosted if agreed else hosted.get(status.worker, ())
        phase = ProcessPhase.STORE if serves else process_phase(status, member, view)
        if phase is ProcessPhase.SPARE and nodes.get(status.worker) not in heard:
            phase = ProcessPhase.LOST
        found.append(
            ProcessStatus(
                id=status.worker,
                pid=status.pid,
                agent=nodes.get(status.worker, ""),
                incarnation=status.incarnation,
                state=phase,
                virtual_ranks=tuple(vranks) if member else (),
                step=status.committed,
                detail=status.detail or (NO_ROOM if status.no_room else ""),
            )
        )
    return tuple(found)


def process_phase(status: WorkerStatus, member: bool, view: View | None) -> ProcessPhase:
    if not status.stage.alive or status.stage is Stage.BOOTING:
        return ProcessPhase(status.stage.value)
    if not member:
        aside = view is not None and any(lag.worker == status.worker for lag in view.suspended)
        return ProcessPhase.SUSPENDED if aside else ProcessPhase.SPARE
    if view is not None and status.view < view.number:
        return ProcessPhase.CHANGING_VIEW
    if status.promised >= status.view:
        return ProcessPhase.STOPPED
    if not status.has_state:
        return ProcessPhase.JOINING
    if view is not None and status.worker in view.spares:
        return ProcessPhase.HOT_SPARE
    if status.ended:
        return ProcessPhase.ENDED
    return ProcessPhase.WAITING if status.waiting else ProcessPhase.COMPUTING
