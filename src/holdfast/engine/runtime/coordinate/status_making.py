"""Makes a job's status from a snapshot of the coordinator machine. It asks nobody."""

from __future__ import annotations

import collections
import os

from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.membership.coordinator_events import CoordinatorSnapshot
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.types import RELEASE_ALL, ProcessRole, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.runtime.job_status import (
    CoordinatorStatus,
    JobPhase,
    JobStatus,
    MemoryStatus,
    NodeStatus,
    ProcessPhase,
    ProcessStatus,
    ServerStatus,
)

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
    """List nodes, including those of the view that a new coordinator has not heard yet."""
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
    """List the servers of tables that listen, where they are to run."""
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
