"""Gives an operator's orders to a running job, and waits until they are carried out.

Commands and the dashboard use it, so that both do the same and answer the same.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence

from holdfast.engine.core.directives import Move
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_problems import SPREAD_STAYS
from holdfast.engine.core.membership.server_places import name_count
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.runtime.contact import ask, contact_of, job_status
from holdfast.engine.runtime.job_status import JobStatus, ProcessPhase
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire.messages import DrainRequest, MoveRequest, OrderReply, ScaleRequest

DRAIN_REASON = "drained by the operator"
MOVE_REASON = "moved by the operator"
LOOK_S = 0.2  # between checks of the job
PATIENCE_S = 60.0  # how long a coordinator may fail to answer


def drain(
    run_dir: RunDir,
    tls: ssl.SSLContext | None,
    nodes: Sequence[str],
    reason: str = DRAIN_REASON,
    deadline_s: float = float("inf"),
) -> list[str]:
    """Order that these nodes leave the job. UserError: a node is unknown, or there is no answer.

    `deadline_s`: the nodes will be gone by then. Returns sentences on possible losses.
    """
    known = [node.id for node in job_status(run_dir, tls).agents]
    if unknown := [node for node in nodes if node not in known]:
        raise UserError(
            f"there is no node {unknown[0]!r} in the job; its nodes: {', '.join(known)}"
        )
    orders = [
        DrainRequest(agent=AgentId(node), reason=reason, deadline_s=deadline_s) for node in nodes
    ]
    return [warning for order in orders if (warning := _give(run_dir, tls, order))]


def await_drained(run_dir: RunDir, tls: ssl.SSLContext | None, node: str) -> None:
    """Wait until the node is not needed, or the run is over. UserError: there is no answer."""

    def has_left(status: JobStatus) -> bool:
        found = status.node(node)
        return found is None or not (found.members or (found.needed and not found.silent))

    _await(run_dir, tls, has_left)


def migrate(
    run_dir: RunDir, tls: ssl.SSLContext | None, worker: int, to: str, reason: str = MOVE_REASON
) -> None:
    """Order that a worker moves to another node. UserError: it cannot, or there is no answer."""
    if run_dir.spec().workers.spread > 1:  # the coordinator answers the same
        raise UserError(SPREAD_STAYS)
    _give(run_dir, tls, make_order(job_status(run_dir, tls), worker, to, reason))


def await_migrated(run_dir: RunDir, tls: ssl.SSLContext | None, worker: int) -> None:
    """Wait until the worker is no member, or the run is over. UserError: there is no answer."""

    def has_left(status: JobStatus) -> bool:
        return not any(each.id == worker and each.state.hosts for each in status.workers)

    _await(run_dir, tls, has_left)


def scale(run_dir: RunDir, tls: ssl.SSLContext | None, servers: int) -> None:
    """Order that the rows of tables be on this number of servers. UserError: they cannot."""
    _give(run_dir, tls, ScaleRequest(servers=servers))


def await_scaled(run_dir: RunDir, tls: ssl.SSLContext | None, servers: int) -> bool:
    """Wait until all rows are on these servers, or the run is over; return whether they are.

    UserError: there is no answer, or another number has been ordered since.
    """
    seen: list[JobStatus] = []

    def is_decided(status: JobStatus) -> bool:
        seen[:] = [status]
        return servers == status.servers_held or servers != status.servers_wanted

    _await(run_dir, tls, is_decided)
    wanted = seen[0].servers_wanted if seen else servers
    if wanted != servers:
        raise UserError(f"{wanted} servers were asked for meanwhile, instead of {servers}")
    return bool(seen) and seen[0].servers_held == servers


def make_order(status: JobStatus, worker: int, to: str, reason: str) -> MoveRequest:
    """Return the request to the coordinator; UserError if the move is not possible."""
    nodes = [node.id for node in status.agents]
    if to not in nodes:
        raise UserError(f"there is no node {to!r} in the job; its nodes: {', '.join(nodes)}")
    found = next((each for each in status.workers if each.id == worker), None)
    if found is None or not found.state.hosts:
        members = [str(each.id) for each in status.workers if each.state.hosts]
        raise UserError(f"worker {worker} takes no part in the job; {', '.join(members)} do")
    if found.agent == to:
        raise UserError(f"worker {worker} is on node {to} already")
    spare = ProcessPhase.SPARE
    if not any(each.agent == to and each.state is spare for each in status.workers):
        raise UserError(
            f"no worker waits on node {to}: start an agent there that offers more of them "
            "(`holdfast agent --nproc`) than the job has virtual ranks for"
        )
    leaving = Move(worker=WorkerId(worker), to=AgentId(to), reason=reason)
    return MoveRequest(agent=AgentId(found.agent), leaving=leaving)


def describe_drained(node: str) -> str:
    """Return the sentence on a node that has been drained."""
    return f"{node} has left the job"


def describe_migrated(worker: int, to: str) -> str:
    """Return the sentence on a worker that has moved."""
    return f"a worker on {to} takes the place of worker {worker}"


def describe_scaled(servers: int) -> str:
    """Return the sentence on tables whose rows are on these servers."""
    return f"tables are on {name_count(servers)}"


def _give(
    run_dir: RunDir,
    tls: ssl.SSLContext | None,
    order: DrainRequest | MoveRequest | ScaleRequest,
) -> str:
    reply = ask(contact_of(run_dir, tls), run_dir.secret(), order, OrderReply)
    if reply.problem:
        raise UserError(reply.problem)
    return reply.warning


def _await(
    run_dir: RunDir, tls: ssl.SSLContext | None, is_done: Callable[[JobStatus], bool]
) -> None:
    answered_at = time.monotonic()
    while run_dir.outcome() is None:
        try:
            if is_done(job_status(run_dir, tls)):
                return
            answered_at = time.monotonic()
        except UserError:  # the coordinator is being replaced, or the run has just ended
            if run_dir.outcome() is None and time.monotonic() > answered_at + PATIENCE_S:
                raise
        time.sleep(LOOK_S)
