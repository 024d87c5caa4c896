"""Finds a job's coordinator, and asks it one question for a command.

A contact names an address, or an election, whose leader at the time of asking is meant.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from dataclasses import dataclass
from typing import TypeVar

from holdfast.engine.core.errors import HoldfastError, NoAnswer, UserError, WorldError
from holdfast.engine.core.types import WorkerId
from holdfast.engine.net.channel import Channel, connect
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.file_tails import read_log_end
from holdfast.engine.runtime.job_status import JobStatus, parse_status
from holdfast.engine.runtime.leadership.election import (
    SCHEMES,
    locate,
    parse_election,
    read_outcome,
)
from holdfast.engine.runtime.rundir import RunDir, shorten_failure
from holdfast.engine.wire.messages import LogReply, LogRequest, StatusReply, StatusRequest

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
            print_plain(
                f"holdfast: {problem}; trying for {patience_s:g} s", file=sys.stderr, flush=True
            )
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
