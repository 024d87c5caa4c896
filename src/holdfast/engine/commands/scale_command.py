"""`holdfast scale` changes the number of servers of a running job, while the job trains."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from holdfast.engine.commands.shared_options import add_tls, show_waiting
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.operator_orders import await_scaled, describe_scaled, scale
from holdfast.engine.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    """Return 0 once all rows are where they are to be, 1 if the job ends before; 130: Ctrl-C."""
    options = parser().parse_args(argv)
    run_dir, tls = RunDir(options.run), client_of(options.tls)
    scale(run_dir, tls, options.servers)
    there = describe_scaled(options.servers)
    with show_waiting(
        "waiting until all rows are there and the job trains on",
        "no longer waiting; the order stands",
    ):
        is_done = await_scaled(run_dir, tls, options.servers)
    if not is_done:
        print_plain(f"holdfast: the run is over before {there}", file=sys.stderr)
        return 1
    print_plain(f"holdfast: {there}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast scale",
        usage="holdfast scale [options] RUN --servers S",
        description="Put the rows of tables on another number of servers. New servers copy their "
        "rows while the job trains, and servers that are not needed any more end. Waits until it "
        "is done. Asked again with the former number, the job stays as it is.",
    )
    found.add_argument("run", metavar="RUN", type=Path, help="the job's run directory")
    found.add_argument(
        "--servers", metavar="S", type=int, required=True, help="the number of servers"
    )
    add_tls(found)
    return found
