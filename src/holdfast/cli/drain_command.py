"""`holdfast drain` has nodes hand their work over to others and leave the job."""

from __future__ import annotations

import argparse
import ssl
import sys
import time
from pathlib import Path

from rich.console import Console

from holdfast.cli.shared_options import add_tls
from holdfast.core.errors import UserError
from holdfast.core.types import AgentId
from holdfast.net.tls import client_of
from holdfast.runtime.contact import ask, contact_of, job_status
from holdfast.runtime.rundir import RunDir
from holdfast.wire.messages import DrainRequest, OrderReply

LOOK_S = 0.2  # between checks of the job
PATIENCE_S = 60.0  # how long a coordinator may fail to answer


def main(argv: list[str]) -> int:
    """Return 0 once the nodes are empty, or the job is over; 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    run_dir, tls = RunDir(options.run_dir), client_of(options.tls)
    nodes = list(dict.fromkeys(AgentId(node) for node in options.nodes))
    known = [node.id for node in job_status(run_dir, tls).agents]
    if unknown := [node for node in nodes if node not in known]:
        raise UserError(
            f"there is no node {unknown[0]!r} in the job; its nodes: {', '.join(known)}"
        )
    names = " and ".join(nodes)
    for node in nodes:
        order = DrainRequest(agent=node, reason=options.reason, deadline_s=options.deadline)
        reply = ask(contact_of(run_dir, tls), run_dir.secret(), order, OrderReply)
        if reply.problem:
            raise UserError(reply.problem)
    try:
        with Console(stderr=True).status(f"{names}: waiting until others have taken the work"):
            for node in nodes:
                _wait(run_dir, tls, node)
    except KeyboardInterrupt:
        print(f"holdfast: no longer waiting for {names}, still drained", file=sys.stderr)
        return 130
    for node in nodes:
        print(f"holdfast: {node} has left the job")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast drain",
        description="Drain nodes before maintenance: their workers leave at a step boundary, once "
        "others have the state, and their agents end. No work is lost. Waits until it is done.",
    )
    found.add_argument(
        "nodes", metavar="NODE", nargs="+", help="a node's name, as `holdfast status` shows it"
    )
    found.add_argument("--run-dir", type=Path, required=True, help="run directory of the job")
    found.add_argument(
        "--reason", default="drained by the operator", help="the reason, for the job's event log"
    )
    found.add_argument(
        "--deadline",
        metavar="SECONDS",
        type=_seconds,
        default=float("inf"),
        help="the nodes will be gone by then: leave them before, even if the workers that take "
        "their place have not received the state yet (default: wait for them)",
    )
    add_tls(found)
    return found


def _seconds(text: str) -> float:
    found = float(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return found


def _wait(run_dir: RunDir, tls: ssl.SSLContext | None, node: AgentId) -> None:
    """Wait until the node has no members, or the run is over. UserError if nobody answers."""
    answered_at = time.monotonic()
    while run_dir.outcome() is None:
        try:
            found = job_status(run_dir, tls).node(node)
            if found is None or not found.members:
                return
            answered_at = time.monotonic()
        except UserError:  # the coordinator is being replaced, or the run has just ended
            if run_dir.outcome() is None and time.monotonic() > answered_at + PATIENCE_S:
                raise
        time.sleep(LOOK_S)
