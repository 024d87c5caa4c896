"""`holdfast dump RUN` collects files that help to understand a run elsewhere."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.commands.shared_options import add_tls
from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import ask, contact_of
from holdfast.engine.runtime.coordinate.black_box import write_bundle
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire.messages import OrderReply, StacksRequest

STACKS_S = 1.0  # for workers to write where their threads are


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast dump`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(options.run_dir)
    run_dir.spec()  # refuses a directory without a run
    if run_dir.outcome() is None:
        try:
            ask(contact_of(run_dir, client_of(options.tls)), run_dir.secret(), ASKED, OrderReply)
            time.sleep(STACKS_S)
        except (HoldfastError, OSError) as error:
            text = f"without new stacks of the workers: {error}"
            print_plain(f"holdfast: {text}", file=sys.stderr, flush=True)
    path = options.output or Path(f"{run_dir.path.resolve().name}-{time.strftime('%H%M%S')}.zip")
    try:
        left_out = write_bundle(run_dir, path, options.event)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    print_plain(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    if left_out:
        print_plain(f"left out for lack of room: {', '.join(left_out)}")
    return 0


ASKED = StacksRequest(reason="an operator asks")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast dump",
        description="Collect files that help to understand a run elsewhere in a zip file: its "
        "events, the recordings of the coordinator, where the workers' threads are, and the ends "
        "of logs. The job's secret is not in it, but its settings and what its script printed are. "
        "The run works on, is over, or was killed.",
    )
    found.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    found.add_argument(
        "--event",
        metavar="ID",
        default="",
        help="begin with the story of this event's incident (default: the newest incident)",
    )
    found.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="write this file (default: RUN-TIME.zip, in the current directory)",
    )
    add_tls(found)
    return found
