"""Finds a job's coordinator, asks it questions, and gives it orders for commands and viewers.

A contact names an address, or an election, whose leader at the time of asking is meant. A command
and the dashboard give an order by the same functions, so that both do the same.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.engine.core.directives import Move
from holdfast.engine.core.errors import HoldfastError, NoAnswer, UserError, WorldError
from holdfast.engine.core.job_problems import SPREAD_STAYS
from holdfast.engine.core.membership.server_places import name_count
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.net.channel import Channel, connect
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.records.run_tail import read_log_end
from holdfast.engine.runtime.job_status import JobStatus, ProcessPhase, parse_status
from holdfast.engine.runtime.leadership.election import (
    SCHEMES,
    locate,
    parse_election,
    read_outcome,
)
from holdfast.engine.runtime.rundir import RunDir, shorten_failure
from holdfast.engine.wire.messages import (
    DrainRequest,
    LogReply,
    LogRequest,
    MoveRequest,
    OrderReply,
    ScaleRequest,
    StatusReply,
    StatusRequest,
)

ANSWER_S = 5.0
AGAIN_S = 0.5
ENDED_ALONE = 4  # exit status of an agent that ends without a word that its job is over
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Names the place of a coordinator.

    `election`: a URL; empty if the coordinator is at `address` (host, port). `job`: it must
    be of this job; empty: any.
    """

    address: tuple[str, int] = ("", 0)
    election: str = ""
    job: str = ""
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return self.election or "{}:{}".format(*self.address)

    async def find(self) -> tuple[str, int]:
        """Return the coordinator's address. OSError while there is none; WorldError; UserError."""
        if not self.election:
            return self.address
        found = await locate(self.election)
        if found is None:
            raise ConnectionError("no coordinator leads the job")
        return found.host, found.port

    async def connect(self, secret: bytes) -> Channel:
        """Connect to the coordinator. OSError while there is none; WorldError; UserError.

        OtherJob, a WorldError, if a coordinator of another job is there.
        """
        return await connect(*await self.find(), secret, job=self.job, tls=self.tls)

    async def has_ended(self) -> bool:
        """Return whether the job has left word in etcd that it is over."""
        if not self.election:
            return False
        try:
            if await locate(self.election) is not None:
                return False  # the leader reports the end itself, once everything has ended
            return await read_outcome(self.election) is not None
        except WorldError:
            return False


def contact_by(text: str, tls: ssl.SSLContext | None = None, job: str = "") -> Contact:
    """Make a contact from HOST:PORT or an election's URL. UserError."""
    if text.startswith(SCHEMES):
        parse_election(text)
        return Contact(election=text, job=job, tls=tls)
    try:
        return Contact(address=parse_address(text), job=job, tls=tls)
    except ValueError as error:
        raise UserError(f"--join {error}") from None


def contact_of(run_dir: RunDir, tls: ssl.SSLContext | None = None) -> Contact:
    """Make a contact for the job in a run directory. UserError."""
    spec = run_dir.spec() if run_dir.job.exists() else None
    job = spec.job if spec is not None else ""
    if spec is not None and spec.nodes.election:
        return Contact(election=spec.nodes.election, job=job, tls=tls)
    return Contact(address=run_dir.address(), job=job, tls=tls)


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT; an IPv6 address may be in brackets. ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not HOST:PORT, such as node7:29600")
    return host, int(port)


async def exchange(contact: Contact, secret: bytes, question: object, answer: type[T]) -> T | None:
    """Ask the coordinator one question, once; None if it has closed the connection.

    OSError, WorldError and asyncio.TimeoutError while it cannot be asked; UserError.
    """
    channel = await contact.connect(secret)
    try:
        channel.send(question)
        found: T | None = await asyncio.wait_for(channel.receive(answer), ANSWER_S)
        return found
    finally:
        channel.close()


def ask(
    contact: Contact, secret: bytes, question: object, answer: type[T], patience_s: float = 0.0
) -> T:
    """Ask the coordinator one question and return its answer. NoAnswer if none comes; UserError.

    `patience_s`: the time for further tries while no coordinator answers.
    """
    deadline, told = time.monotonic() + patience_s, False
    while True:
        try:
            reply = asyncio.run(exchange(contact, secret, question, answer))
        except asyncio.TimeoutError:
            problem = f"the coordinator at {contact} does not answer"
        except WorldError as error:
            raise UserError(f"the coordinator at {contact} cannot be asked ({error})") from None
        except OSError as error:
            problem = f"the coordinator at {contact} cannot be reached ({error})"
        else:
            if reply is not None:
                return reply
            problem = f"the coordinator at {contact} closed the connection"
        if time.monotonic() >= deadline:
            raise NoAnswer(problem)
        if not told:
            told = True
            print_line(f"{problem}; trying for {patience_s:g} s")
        time.sleep(AGAIN_S)


def job_status(run_dir: RunDir, tls: ssl.SSLContext | None = None) -> JobStatus:
    """Ask the coordinator for the job's status. NoAnswer; UserError, also if the job is over."""
    secret = run_dir.secret()
    outcome = run_dir.outcome()
    if outcome is not None:
        how = "it succeeded" if outcome == "" else shorten_failure(outcome)
        raise UserError(f"the run in {run_dir.path} is over: {how}")
    reply = ask(contact_of(run_dir, tls), secret, StatusRequest(), StatusReply)
    return parse_status(reply.text)


def read_worker_log(
    run_dir: RunDir, tls: ssl.SSLContext | None, worker: int
) -> tuple[str, list[str]]:
    """Return the name and the last lines of a worker's newest log. Without one both are empty.

    The coordinator asks the worker's node. If it does not answer, or the job is over, the log in
    the run directory here counts.
    """
    if run_dir.outcome() is None:
        try:
            question = LogRequest(worker=WorkerId(worker))
            reply = ask(contact_of(run_dir, tls), run_dir.secret(), question, LogReply)
            if reply.name:
                return reply.name, list(reply.lines)
        except (HoldfastError, OSError):
            pass  # `holdfast status` shows why it does not answer
    return read_log_end(run_dir.logs, worker)


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
    """Order that the service use this number of servers. UserError: it cannot."""
    _give(run_dir, tls, ScaleRequest(servers=servers))


def await_scaled(run_dir: RunDir, tls: ssl.SSLContext | None, servers: int) -> bool:
    """Wait until all contents are on these servers, or the run is over; return whether they are.

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
    """Return the sentence on a service that is on these servers."""
    return f"the service is on {name_count(servers)}"


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
