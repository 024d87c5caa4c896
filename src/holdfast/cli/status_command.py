"""`holdfast status` asks a running job's coordinator what the job is doing, and prints it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli.shared_options import add_tls
from holdfast.net.tls import client_of
from holdfast.runtime.contact import job_status
from holdfast.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast status", description="Show a running job's view, step and processes."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    add_tls(parser)
    options = parser.parse_args(argv)
    status = job_status(RunDir(options.run_dir), client_of(options.tls))
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        show(status)
    return 0


def _agent(agent: dict[str, Any]) -> str:
    marks = [f"pid {agent['pid']}", f"{agent['members']} workers train"]
    marks += ["silent"] if agent["silent"] else []
    marks += [f"draining: {agent['draining']}"] if agent["draining"] else []
    marks += agent["domains"]
    if size := agent["pieces_bytes"]:
        marks.append(f"{size / 1e6:.3g} MB of pieces")
    return f"{agent['id']} ({', '.join(marks)})"


def show(status: dict[str, Any]) -> None:
    console = Console()
    agents = ", ".join(map(_agent, status["agents"]))
    console.print(
        f"[bold]{status['state']}[/bold]  view {status['view']}  step {status['step']}  "
        f"coordinator pid {status['coordinator']['pid']}  agents {agents}"
    )
    if (memory := status["memory"]) is not None:
        console.print(
            f"{memory['redundancy']}: the nodes' memory holds the state until step "
            f"{memory['step']}, in {memory['bytes'] / 1e6:.3g} MB"
        )
    ranks_are = "rank" if status["group"] else "virtual ranks"
    table = Table("worker", "pid", "incarnation", "state", "step", ranks_are)
    for worker in status["workers"]:
        leads = worker["id"] == status["leader"] and not status["group"]
        mark = " (leader)" if leads else ""
        ranks = " ".join(map(str, worker["virtual_ranks"]))
        row = (worker["pid"], worker["incarnation"], worker["state"], worker["step"], ranks)
        table.add_row(f"{worker['id']}{mark}", *map(str, row))
    console.print(table)
