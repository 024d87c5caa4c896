"""`holdfast status` asks a running job's coordinator what the job is doing, and prints it."""

from __future__ import annotations

import argparse
import json
import ssl
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli.shared_options import add_tls
from holdfast.core.errors import UserError
from holdfast.net.tls import client_of
from holdfast.runtime.contact import ask, contact_of
from holdfast.runtime.rundir import RunDir
from holdfast.wire.messages import StatusReply, StatusRequest


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast status", description="Show a running job's view, step and processes."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    add_tls(parser)
    options = parser.parse_args(argv)
    status = fetch(RunDir(options.run_dir), client_of(options.tls))
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        show(status)
    return 0


def fetch(run_dir: RunDir, tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    """Ask the coordinator. UserError if there is no run, or it is over or unreachable."""
    secret = run_dir.secret()
    outcome = run_dir.outcome()
    if outcome is not None:
        how = "it succeeded" if outcome == "" else f"it failed: {outcome.splitlines()[0]}"
        raise UserError(f"the run in {run_dir.path} is over: {how}")
    reply = ask(contact_of(run_dir, tls), secret, StatusRequest(), StatusReply)
    found: dict[str, Any] = json.loads(reply.text)
    return found


def _agent(agent: dict[str, Any]) -> str:
    marks = [f"pid {agent['pid']}", f"{agent['members']} workers train"]
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
