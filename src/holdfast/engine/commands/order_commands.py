"""Gives orders to a running job: `holdfast drain`, `holdfast migrate` and `holdfast scale`.

Each waits until its order is carried out. Ctrl-C ends the waiting, and the order stands.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.engine.commands.shared_options import add_run_and, add_tls, show_waiting, take_run
from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_line, print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import (
    DRAIN_REASON,
    MOVE_REASON,
    await_drained,
    await_migrated,
    await_scaled,
    describe_drained,
    describe_migrated,
    describe_scaled,
    drain,
    migrate,
    scale,
)
from holdfast.engine.runtime.rundir import RunDir


def run_drain(argv: list[str]) -> int:
    """Return 0 once the nodes are empty, or the job is over; 130 after Ctrl-C."""
    found = make_drain_parser()
    options = found.parse_args(argv)
    run, names_given = take_run(found, options.words, options.run_dir, "NODE")
    run_dir, tls = RunDir(run), client_of(options.tls)
    nodes = list(dict.fromkeys(names_given))
    names = " and ".join(nodes)
    for warning in drain(run_dir, tls, nodes, options.reason, options.deadline):
        print_line(warning)
    with show_waiting(
        f"{names}: waiting until others have taken the work",
        f"no longer waiting for {names}, still drained",
    ):
        for node in nodes:
            await_drained(run_dir, tls, node)
    for node in nodes:
        print_plain(f"holdfast: {describe_drained(node)}")
    return 0


def make_drain_parser() -> argparse.ArgumentParser:
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


def run_migrate(argv: list[str]) -> int:
    """Return 0 once the worker has left its node, or the job is over; 130 after Ctrl-C."""
    found = make_migrate_parser()
    options = found.parse_args(argv)
    run, words = take_run(found, options.words, options.run_dir, "WORKER")
    worker = _read_worker(words)
    run_dir, tls = RunDir(run), client_of(options.tls)
    migrate(run_dir, tls, worker, options.to, options.reason)
    waiting = describe_migrated(worker, options.to)
    with show_waiting(waiting, f"no longer waiting; {waiting} all the same"):
        await_migrated(run_dir, tls, worker)
    print_plain(f"holdfast: {waiting}")
    return 0


def make_migrate_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast migrate",
        usage="holdfast migrate [options] RUN WORKER --to NODE",
        description="Move a worker to another node: a worker that waits there receives the state "
        "while the job trains, takes part, and then the other one leaves. Waits until it is done.",
    )
    add_run_and(found, "WORKER", "the worker's number")
    found.add_argument(
        "--to", metavar="NODE", required=True, help="the node, as `holdfast status` shows it"
    )
    found.add_argument("--reason", default=MOVE_REASON, help="the reason, for the job's event log")
    add_tls(found)
    return found


def _read_worker(words: list[str]) -> int:
    if len(words) > 1:
        raise UserError(f"{' '.join(words)}: name one worker, which is moved")
    if not (words[0].isascii() and words[0].isdecimal()):
        raise UserError(f"worker {words[0]}: workers are numbered from 0")
    return int(words[0])


def run_scale(argv: list[str]) -> int:
    """Return 0 once all rows are where they are to be, 1 if the job ends before; 130: Ctrl-C."""
    options = make_scale_parser().parse_args(argv)
    run_dir, tls = RunDir(options.run), client_of(options.tls)
    scale(run_dir, tls, options.servers)
    there = describe_scaled(options.servers)
    with show_waiting(
        "waiting until all rows are there and the job trains on",
        "no longer waiting; the order stands",
    ):
        is_done = await_scaled(run_dir, tls, options.servers)
    if not is_done:
        print_line(f"the run is over before {there}")
        return 1
    print_plain(f"holdfast: {there}")
    return 0


def make_scale_parser() -> argparse.ArgumentParser:
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
