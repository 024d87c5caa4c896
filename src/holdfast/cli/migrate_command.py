"""`holdfast migrate` moves a worker of a running job to another node, while the job trains."""

from __future__ import annotations

import argparse
import ssl
import sys
import time
from pathlib import Path

from rich.console import Console

from holdfast.cli.drain_command import LOOK_S, PATIENCE_S
from holdfast.cli.shared_options import add_tls
from holdfast.core.errors import UserError
from holdfast.core.job_problems import SPREAD_STAYS
from holdfast.core.types import AgentId, Leaving, WorkerId
from holdfast.net.tls import client_of
from holdfast.runtime.contact import ask, contact_of, job_status
from holdfast.runtime.job_status import JobStatus, ProcessPhase
from holdfast.runtime.rundir import RunDir
from holdfast.wire.messages import MoveRequest, OrderReply


def main(argv: list[str]) -> int:
    """Return 0 once the worker has left its node, or the job is over; 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    if options.worker < 0:
        raise UserError(f"worker {options.worker}: workers are numbered from 0")
    run_dir, tls = RunDir(options.run_dir), client_of(options.tls)
    if run_dir.spec().workers.spread > 1:  # the coordinator says the same, where this is not read
        raise UserError(SPREAD_STAYS)
    order = make_order(job_status(run_dir, tls), options.worker, options.to, options.reason)
    reply = ask(contact_of(run_dir, tls), run_dir.secret(), order, OrderReply)
    if reply.problem:
        raise UserError(reply.problem)
    waiting = f"a worker on {options.to} takes the place of worker {options.worker}"
    try:
        with Console(stderr=True).status(waiting):
            _wait(run_dir, tls, options.worker)
    except KeyboardInterrupt:
        print(f"holdfast: no longer waiting; {waiting} all the same", file=sys.stderr)
        return 130
    print(f"holdfast: {waiting}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast migrate",
        description="Move a worker to another node: a worker that waits there receives the state "
        "while the job trains, takes part, and then the other one leaves. Waits until it is done.",
    )
    found.add_argument("worker", metavar="WORKER", type=int, help="number of the worker")
    found.add_argument(
        "--to", metavar="NODE", required=True, help="the node, as `holdfast status` shows it"
    )
    found.add_argument("--run-dir", type=Path, required=True, help="run directory of the job")
    found.add_argument(
        "--reason", default="moved by the operator", help="the reason, for the job's event log"
    )
    add_tls(found)
    return found


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
    leaving = Leaving(worker=WorkerId(worker), to=AgentId(to), reason=reason)
    return MoveRequest(agent=AgentId(found.agent), leaving=leaving)


def _wait(run_dir: RunDir, tls: ssl.SSLContext | None, worker: int) -> None:
    """Wait until the worker is no member, or the run is over. UserError if nobody answers."""
    answered_at = time.monotonic()
    while run_dir.outcome() is None:
        try:
            workers = job_status(run_dir, tls).workers
            if not any(each.id == worker and each.state.hosts for each in workers):
                return
            answered_at = time.monotonic()
        except UserError:  # the coordinator is being replaced, or the run has just ended
            if run_dir.outcome() is None and time.monotonic() > answered_at + PATIENCE_S:
                raise
        time.sleep(LOOK_S)
