"""`holdfast migrate` moves a worker of a running job to another node, while the job trains."""

from __future__ import annotations

import argparse

from holdfast.engine.commands.shared_options import add_run_and, add_tls, show_waiting, take_run
from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.operator_orders import (
    MOVE_REASON,
    await_migrated,
    describe_migrated,
    migrate,
)
from holdfast.engine.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    """Return 0 once the worker has left its node, or the job is over; 130 after Ctrl-C."""
    found = parser()
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


def parser() -> argparse.ArgumentParser:
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
