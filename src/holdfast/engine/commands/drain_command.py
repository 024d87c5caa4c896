"""`holdfast drain` has nodes hand their work over to others and leave the job."""

from __future__ import annotations

import argparse
import sys

from holdfast.engine.commands.shared_options import add_run_and, add_tls, show_waiting, take_run
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.operator_orders import (
    DRAIN_REASON,
    await_drained,
    describe_drained,
    drain,
)
from holdfast.engine.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    """Return 0 once the nodes are empty, or the job is over; 130 after Ctrl-C."""
    found = parser()
    options = found.parse_args(argv)
    run, names_given = take_run(found, options.words, options.run_dir, "NODE")
    run_dir, tls = RunDir(run), client_of(options.tls)
    nodes = list(dict.fromkeys(names_given))
    names = " and ".join(nodes)
    for warning in drain(run_dir, tls, nodes, options.reason, options.deadline):
        print_plain(f"holdfast: {warning}", file=sys.stderr, flush=True)
    with show_waiting(
        f"{names}: waiting until others have taken the work",
        f"no longer waiting for {names}, still drained",
    ):
        for node in nodes:
            await_drained(run_dir, tls, node)
    for node in nodes:
        print_plain(f"holdfast: {describe_drained(node)}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast drain",
        usage="holdfast drain [options] RUN NODE [NODE ...]",
        description="Drain nodes before maintenance: their workers leave at a step boundary, once "
        "others have the state, and their agents end. No work is lost. Waits until it is done.",
    )
    add_run_and(found, "NODE", "names of nodes, as `holdfast status` shows them")
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
