"""`holdfast status` asks a running job's coordinator what the job is doing, and prints it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table
from rich.text import Text

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.commands.shared_options import add_tls
from holdfast.engine.core.errors import NoAnswer, UserError
from holdfast.engine.core.membership.server_places import name_count
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_status import JobStatus, NodeStatus
from holdfast.engine.runtime.rundir import RUNS, RunDir


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast status", description="Show a running job's view, step and processes."
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="directory of the run")
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="the same, as an option")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    add_tls(parser)
    options = parser.parse_args(argv)
    named = [path for path in (options.run, options.run_dir) if path is not None]
    if len(named) != 1:
        newest = max(
            (run.path for run in map(RunDir, RUNS.glob("*")) if run.job.is_file()), default="RUN"
        )
        parser.error(f"name one run directory: holdfast status {newest}")
    try:
        status = job_status(RunDir(named[0]), client_of(options.tls))
    except NoAnswer as error:
        raise UserError(
            f"{error.problem}: is the job running? If it was killed, `holdfast resume {named[0]}` "
            "goes on with it"
        ) from None
    if options.json:
        print_plain(json.dumps(status.to_dict(), indent=2))
    else:
        show(status)
    return 0


def describe_node(node: NodeStatus) -> str:
    training = "1 worker trains" if node.members == 1 else f"{node.members} workers train"
    marks = [f"pid {node.pid}", training]
    marks += ["silent"] if node.silent else []
    marks += [f"draining: {node.draining}"] if node.draining else []
    marks += node.domains
    if node.pieces_bytes:
        marks.append(f"{node.pieces_bytes / 1e6:.3g} MB of pieces")
    return f"{node.id} ({', '.join(marks)})"


def show(status: JobStatus) -> None:
    console = PlainConsole()
    agents = ", ".join(map(describe_node, status.agents))
    console.print(
        Text(status.state.value, "bold"),
        f" view {status.view}  step {status.step}  coordinator pid {status.coordinator.pid}  "
        f"agents {agents}",
    )
    if status.awaited:
        console.print(Text(status.awaited))
    if (memory := status.memory) is not None:
        console.print(
            f"{memory.redundancy}: the nodes' memory holds the state until step "
            f"{memory.step}, in {memory.bytes / 1e6:.3g} MB"
        )
    if status.servers:
        each = (f"{s.number} on {s.agent} (pid {s.pid})" for s in status.servers)
        console.print(f"servers of tables: {', '.join(each)}")
    if status.servers_wanted != status.servers_held:
        console.print(
            f"the service goes from {name_count(status.servers_held)} to {status.servers_wanted}"
        )
    ranks_are = "rank" if status.group else "virtual ranks"
    table = Table("worker", "pid", "incarnation", "state", "step", ranks_are)
    for worker in status.workers:
        mark = " (leader)" if worker.id == status.leader and not status.group else ""
        ranks = " ".join(map(str, worker.virtual_ranks))
        row = (worker.pid, worker.incarnation, worker.state.value, worker.step, ranks)
        table.add_row(f"{worker.id}{mark}", *map(str, row))
    console.print(table)
