"""`holdfast agent`: this machine becomes a further node of a running job."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path

from holdfast.core.errors import UserError, WireError, WorldError
from holdfast.core.types import AgentId
from holdfast.runtime.channel import connect
from holdfast.runtime.election import locate
from holdfast.runtime.launcher import Node, incarnation_now, launch_node
from holdfast.runtime.rundir import RunDir
from holdfast.runtime.secret import load_secret
from holdfast.wire.messages import JoinReply, JoinRequest

ANSWER_S = 5.0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast agent",
        description="Add this machine to a running job. The script must be at the same path here "
        "as where the job was started.",
    )
    found.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="the job's coordinator, or the URL where coordinators are elected",
    )
    found.add_argument(
        "--nproc", type=int, metavar="N", help="workers here (default: as on the first node)"
    )
    found.add_argument(
        "--name", help="of this node, the same each time that it comes back (default: made up)"
    )
    found.add_argument(
        "--host", help="by which other nodes reach this one (default: as the coordinator sees it)"
    )
    found.add_argument(
        "--secret-file",
        type=Path,
        help="with the job's secret, readable by you only (default: HOLDFAST_SECRET, or the run "
        "directory's)",
    )
    found.add_argument(
        "--run-dir",
        type=Path,
        help="for this node's logs and ledger; the job's own if it is shared "
        "(default: holdfast-runs/NAME)",
    )
    return found


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    elected = options.join.startswith(("etcd://", "etcds://"))
    host, port = _elected(options.join) if elected else _address(options.join)
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}: at least 1 worker is needed")
    secret = load_secret(os.environ, file=options.secret_file, run_dir=options.run_dir)
    reply = ask(host, port, secret)
    spec = reply.spec
    name = AgentId(options.name or f"{socket.gethostname()}-{secrets.token_hex(3)}")
    if not os.path.isdir(spec.cwd) or not os.path.isfile(os.path.join(spec.cwd, spec.script)):
        raise UserError(f"the job's script {spec.script} is not under {spec.cwd} on this machine")
    run_dir = RunDir((options.run_dir or Path("holdfast-runs") / name).absolute())
    run_dir.attach(spec, secret)
    os.chdir(spec.cwd)
    print(f"holdfast: node {name} joins {host}:{port}", file=sys.stderr, flush=True)
    return launch_node(
        Node(
            run_dir=run_dir,
            name=name,
            nproc=options.nproc or spec.nproc,
            host=options.host or reply.seen_as,
            coordinator=None if elected else (host, port),
            election=options.join if elected else "",
            first_incarnation=incarnation_now() if options.name else 1,
        )
    )


def ask(host: str, port: int, secret: bytes) -> JoinReply:
    """What the job is, and how this machine is seen from there. UserError."""

    async def question() -> JoinReply | None:
        channel = await connect(host, port, secret)
        channel.send(JoinRequest())
        reply: JoinReply | None = await asyncio.wait_for(channel.receive(JoinReply), ANSWER_S)
        channel.close()
        return reply

    try:
        reply = asyncio.run(question())
    except (OSError, asyncio.TimeoutError, WireError) as error:
        raise UserError(f"cannot join {host}:{port}: {error or 'no answer'}") from None
    if reply is None:
        raise UserError(f"{host}:{port} closed the connection: is the job over?")
    return reply


def _elected(url: str) -> tuple[str, int]:
    try:
        found = asyncio.run(locate(url))
    except WorldError as error:
        raise UserError(f"cannot join by {url}: {error}") from None
    if found is None:
        raise UserError(f"no coordinator is in office at {url}: start the job first")
    return found.host, found.port


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--join {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
