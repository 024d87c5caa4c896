"""`holdfast migrate` moves a worker of a running job to another node, while the job trains."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from holdfast.cli.shared_options import add_tls
from holdfast.core.errors import UserError
from holdfast.net.tls import client_of
from holdfast.runtime.operator_orders import (
    MOVE_REASON,
    await_migrated,
    describe_migrated,
    migrate,
)
from holdfast.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    """Return 0 once the worker has left its node, or the job is over; 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    if options.worker < 0:
        raise UserError(f"worker {options.worker}: workers are numbered from 0")
    run_dir, tls = RunDir(options.run_dir), client_of(options.tls)
    migrate(run_dir, tls, options.worker, options.to, options.reason)
    waiting = describe_migrated(options.worker, options.to)
    try:
        with Console(stderr=True).status(waiting):
            await_migrated(run_dir, tls, options.worker)
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
    found.add_argument("--reason", default=MOVE_REASON, help="the reason, for the job's event log")
    add_tls(found)
    return found
