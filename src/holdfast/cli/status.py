"""`holdfast status`: what a running job is doing, asked of its coordinator."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.core.errors import UserError, WorldError
from holdfast.runtime.channel import connect
from holdfast.runtime.election import locate
from holdfast.runtime.rundir import RunDir
from holdfast.wire.messages import StatusReply, StatusRequest

ANSWER_S = 5.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast status", description="Show a running job: view, step, processes."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(argv)
    status = ask(RunDir(options.run_dir))
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        show(status)
    return 0


def find(run_dir: RunDir) -> tuple[str, int]:
    """Where the coordinator is. UserError."""
    election = run_dir.spec().election if run_dir.job.exists() else ""
    if not election:
        return run_dir.address()
    try:
        found = asyncio.run(locate(election))
    except WorldError as error:
        raise UserError(f"cannot look up the coordinator at {election}: {error}") from None
    if found is None:
        raise UserError(f"no coordinator is in office at {election} just now: ask again")
    return found.host, found.port


def ask(run_dir: RunDir) -> dict[str, Any]:
    """The coordinator's answer. UserError when there is no run, or it is over or unreachable."""
    secret = run_dir.secret()
    outcome = run_dir.outcome()
    if outcome is not None:
        how = "it succeeded" if outcome == "" else f"it failed: {outcome.splitlines()[0]}"
        raise UserError(f"the run in {run_dir.path} is over: {how}")
    host, port = find(run_dir)

    async def question() -> StatusReply | None:
        channel = await connect(host, port, secret)
        channel.send(StatusRequest())
        return await asyncio.wait_for(channel.receive(StatusReply), ANSWER_S)

    try:
        reply = asyncio.run(question())
    except (OSError, asyncio.TimeoutError) as error:
        raise UserError(
            f"the coordinator at {host}:{port} does not answer ({error}): is the job still running?"
        ) from None
    if reply is None:
        raise UserError(f"the coordinator at {host}:{port} closed the connection: ask again")
    found: dict[str, Any] = json.loads(reply.text)
    return found


def _agent(agent: dict[str, Any]) -> str:
    marks = [f"pid {agent['pid']}"]
    marks += ["silent"] if agent["silent"] else []
    marks += [f"draining: {agent['draining']}"] if agent["draining"] else []
    return f"{agent['id']} ({', '.join(marks)})"


def show(status: dict[str, Any]) -> None:
    console = Console()
    agents = ", ".join(map(_agent, status["agents"]))
    console.print(
        f"[bold]{status['state']}[/bold]  view {status['view']}  step {status['step']}  "
        f"coordinator pid {status['coordinator']['pid']}  agents {agents}"
    )
    table = Table("worker", "pid", "incarnation", "state", "step", "virtual ranks")
    for worker in status["workers"]:
        mark = " (leader)" if worker["id"] == status["leader"] else ""
        ranks = " ".join(map(str, worker["virtual_ranks"]))
        row = (worker["pid"], worker["incarnation"], worker["state"], worker["step"], ranks)
        table.add_row(f"{worker['id']}{mark}", *map(str, row))
    console.print(table)
