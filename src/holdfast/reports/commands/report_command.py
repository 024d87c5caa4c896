"""`holdfast report RUN` writes one HTML page about a run, or prints its figures for scripts.

It works while the run does, and after a crash.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.core.errors import NoAnswer, UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.summary import summarize
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.rundir import RunDir, read_goodput
from holdfast.reports.report_page import write_report


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast report`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(Path(options.run_dir))
    if options.json:
        print_plain(json.dumps(read_goodput(run_dir).to_dict(), indent=2))
        return 0
    path = options.output or run_dir.path / "report.html"
    for line in summarize(write_report(run_dir, path)):
        print_plain(line)
    if run_dir.outcome() is None and _is_deserted(run_dir):
        print_plain(
            "the run has no end and no live coordinator: if it was killed, "
            f"`holdfast resume {run_dir.path}` goes on with it"
        )
    print_plain(f"report: {path}")
    return 0


def _is_deserted(run_dir: RunDir) -> bool:
    """Return whether no coordinator answers; one that wants a certificate is there."""
    try:
        job_status(run_dir)
    except NoAnswer:
        return True
    except UserError:
        pass
    return False


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast report",
        description="Write one HTML page about a run: loss with faults marked, where the time of "
        "all workers went, how long steps took, and each incident with its cost. It reads the "
        "run's files, also while the run works and after a crash.",
    )
    found.add_argument("run_dir", metavar="RUN", help="directory of the run")
    found.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the page here (default: RUN/report.html)",
    )
    found.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    return found
