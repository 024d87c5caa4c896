"""`holdfast audit RUN --share F` computes a random share of a run's steps again, and compares them.

Exit status: 0 all of them are the same, 1 one differs, 2 they cannot be computed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.step_records import read_steps
from holdfast.reports.commands.replay_command import add_common, conclude, replay


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast audit`."""
    options = parser().parse_args(argv)
    if not 0 < options.share <= 1:
        raise UserError(f"--share {options.share:g}: give a share above 0, and up to 1")
    recorded = read_steps(options.run_dir)
    steps = sorted(recorded.steps)
    if not steps:
        raise UserError(f"the ledger of {options.run_dir} has no step")
    count = max(round(options.share * len(steps)), 1)
    chosen = sorted(random.Random(options.seed).sample(steps, count))
    found = replay(options.run_dir, recorded, chosen, options.timeout, quiet=options.json)
    line = f"{count} of {len(steps)} steps chosen: {', '.join(map(str, chosen))}"
    return conclude(found, as_json=options.json, about={"chosen": chosen}, before=[line])


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast audit",
        description="Compute a random share of a run's committed steps again, on one worker of "
        "this machine, with those between them and the newest checkpoint before, and compare "
        "them with what the run has recorded. The run is only read.",
    )
    found.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
    found.add_argument(
        "--share", type=float, required=True, metavar="F", help="of the steps, such as 0.01"
    )
    found.add_argument("--seed", type=int, default=0, help="another choice of steps (default 0)")
    add_common(found)
    return found
