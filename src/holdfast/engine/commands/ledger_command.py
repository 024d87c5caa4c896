"""`holdfast ledger verify RUN_DIR [--json]` prints the proof that every sample was used once.

It reads and prints, without decisions. Must not import torch, so that it starts at once and runs
where there is none. Exit status: 0 proved, 1 not proved, 2 there is no ledger to verify.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.ledger_audit import LedgerReport, verify
from holdfast.engine.records.ledger_claims import claims_of_record
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.train.data.sampling import plan_of


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv`: the words after `holdfast ledger`."""
    parser = argparse.ArgumentParser(prog="holdfast ledger")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("verify", help="prove that every sample was used exactly once")
    check.add_argument("run_dir", help="directory of the run")
    check.add_argument("--json", action="store_true", help="print the whole report as JSON")
    arguments = parser.parse_args(argv)
    try:
        record = RunDir(Path(arguments.run_dir)).load_record()
        report = verify(arguments.run_dir, plan_of, claims_of_record(record))
    except UserError as error:
        print_plain(f"holdfast ledger: {error}", file=sys.stderr)
        return 2
    print_plain(json.dumps(report.to_dict(), indent=2) if arguments.json else render(report))
    return 0 if report.ok else 1


def render(report: LedgerReport) -> str:
    """Format the report for people, one finding a line."""
    lines = [
        f"{_steps(report)} steps, {report.samples} samples, "
        f"{report.copies} copies in {report.files} files",
        f"{report.lost} lost, {report.repeated} repeated, "
        f"{len(report.replayed)} steps replayed, {report.torn} files torn at their end",
        *report.findings,
        *(
            [f"not exact: from step {report.inexact_since} on something wrong may have been used"]
            if report.inexact_since is not None
            else []
        ),
        *(
            [
                f"not exact: {report.dropped} samples of late workers were dropped by choice, in "
                f"{report.dropped_in} steps (--backup)"
            ]
            if report.dropped
            else []
        ),
        *(
            [
                f"{report.skipped} samples were left out by the script, in {report.skipped_in} "
                "steps (step.skip, or a weight of 0)"
            ]
            if report.skipped
            else []
        ),
        *(
            [
                f"{report.quarantined} records were quarantined as bad, and others were used in "
                f"their place {report.replaced} times, as was told"
            ]
            if report.quarantined
            else []
        ),
        _describe_proof(report) if report.ok else "NOT PROVED",
    ]
    return "\n".join(lines)


def _steps(report: LedgerReport) -> str:
    if report.job_steps is None or report.steps >= report.job_steps:
        return str(report.steps)
    return f"{report.steps} of {report.job_steps}"


def _describe_proof(report: LedgerReport) -> str:
    which = "every other sample" if report.dropped or report.skipped else "every sample"
    return f"{which} was used exactly once"
