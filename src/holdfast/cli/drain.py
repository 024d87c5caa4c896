"""`holdfast drain`: a node hands its work over to others and leaves the job."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from holdfast.cli.options import add_tls, tls_of
from holdfast.cli.status import fetch
from holdfast.core.errors import UserError
from holdfast.core.types import AgentId
from holdfast.runtime.contact import ask, contact_of
from holdfast.runtime.rundir import RunDir
from holdfast.wire.messages import DrainReply, DrainRequest

LOOK_S = 0.2  # between two looks at the job


def main(argv: list[str]) -> int:
    """Exit status 0 once the node is empty, or the job is over; 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    run_dir, tls, node = RunDir(options.run_dir), tls_of(options), AgentId(options.node)
    fetch(run_dir, tls)  # says so if the run is over
    order = DrainRequest(agent=node, reason=options.reason)
    reply = ask(contact_of(run_dir, tls), run_dir.secret(), order, DrainReply)
    if reply.problem:
        raise UserError(reply.problem)
    waiting = f"{node} is left at the next step boundary, once others can take its work"
    try:
        with Console(stderr=True).status(waiting):
            while run_dir.outcome() is None and _members(fetch(run_dir, tls), node):
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        print(f"holdfast: no longer waiting; {node} still drains", file=sys.stderr)
        return 130
    print(f"holdfast: {node} takes no part any more")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast drain",
        description="Empty a node before maintenance: its workers leave at a step boundary, when "
        "others have their state, and its agent ends. Nothing is computed twice. Waits for it.",
    )
    found.add_argument("node", metavar="NODE", help="its name, as `holdfast status` shows it")
    found.add_argument("--run-dir", type=Path, required=True, help="of the job")
    found.add_argument("--reason", default="drained by the operator", help="for the job's story")
    add_tls(found)
    return found


def _members(status: dict[str, object], node: AgentId) -> int:
    agents = status["agents"]
    assert isinstance(agents, list)
    return sum(int(a["members"]) for a in agents if a["id"] == node)
