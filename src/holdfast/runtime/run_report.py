"""Makes the report of a run from its files: where the time went, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.observe.goodput import Goodput, share_out
from holdfast.observe.report_page import RunFacts, write_page
from holdfast.observe.step_records import read_steps
from holdfast.runtime.rundir import RunDir, read_run_events


def read_goodput(run_dir: RunDir) -> Goodput:
    """Return where the time of a run went. UserError if its workers wrote nothing about it."""
    found = share_out(run_dir.path, read_run_events(run_dir))
    if found is None:
        raise UserError(
            f"{run_dir.path} holds no times of workers: none has begun yet, or the run is of an "
            "older Holdfast, or of --compat"
        )
    return found


def write_report(run_dir: RunDir, path: Path) -> Goodput:
    """Write the page of a run, and return where its time went. UserError."""
    goodput, spec = read_goodput(run_dir), run_dir.spec()
    facts = RunFacts(
        name=run_dir.path.resolve().name,
        script=" ".join([spec.script, *spec.args]),
        outcome=run_dir.outcome(),
        goodput=goodput,
        losses=_read_losses(run_dir),
    )
    try:
        path.write_text(write_page(facts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return goodput


def _read_losses(run_dir: RunDir) -> dict[int, float]:
    """Return the loss of each step by its number; none without a ledger."""
    try:
        steps = read_steps(run_dir.path).steps
    except UserError:
        return {}
    return {step: float.fromhex(line.loss) for step, line in steps.items()}
