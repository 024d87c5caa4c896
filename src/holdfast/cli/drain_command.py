"""`holdfast drain` has nodes hand their work over to others and leave the job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from holdfast.cli.shared_options import add_tls
from holdfast.net.tls import client_of
from holdfast.runtime.operator_orders import DRAIN_REASON, await_drained, describe_drained, drain
from holdfast.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    """Return 0 once the nodes are empty, or the job is over; 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    run_dir, tls = RunDir(options.run_dir), client_of(options.tls)
    nodes = list(dict.fromkeys(options.nodes))
    names = " and ".join(nodes)
    drain(run_dir, tls, nodes, options.reason, options.deadline)
    try:
        with Console(stderr=True).status(f"{names}: waiting until others have taken the work"):
            for node in nodes:
                await_drained(run_dir, tls, node)
    except KeyboardInterrupt:
        print(f"holdfast: no longer waiting for {names}, still drained", file=sys.stderr)
        return 130
    for node in nodes:
        print(f"holdfast: {describe_drained(node)}")
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
    found.add_argument("--reason", default=DRAIN_REASON, help="the reason, for the job's event log")
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
