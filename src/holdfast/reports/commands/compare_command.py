"""`holdfast compare A B` finds the first step at which two runs differ, and what differs there.

It reads and prints; it decides nothing. Exit status: 0 no difference, 1 a difference, 2 the runs
cannot be compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.step_records import read_steps
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.run_comparison import Comparison, compare_runs


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast compare`."""
    options = parser().parse_args(argv)
    ours, theirs = (read_steps(each) for each in (options.first, options.second))
    first, second = (_parts_of_states(each) for each in (options.first, options.second))
    found = compare_runs(ours, theirs, first[0], has_states=first == second)
    print_plain(json.dumps(found.to_dict(), indent=2) if options.json else render(found))
    return 0 if found.first is None else 1


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast compare",
        description="Find the first step at which two runs of one job differ, and what differs: "
        "the samples, the state that the step began with, what a task computed from them (its loss "
        "or its gradient, and which workers computed it), the sum of the gradients, or the update. "
        "Nothing is computed again; the ledgers are read.",
    )
    found.add_argument("first", metavar="RUN_A", help="directory of a run")
    found.add_argument("second", metavar="RUN_B", help="directory of another run of the same job")
    found.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return found


def _parts_of_states(run_dir: str) -> tuple[int, bool]:
    """Return the settings that say which parts of the state a run digests in its steps."""
    spec = RunDir(Path(run_dir)).spec()
    return spec.silent_errors.fingerprint_steps, spec.workers.shard_optimizer


def render(found: Comparison) -> str:
    """Return the result for people."""
    lines = []
    if found.first is None:
        lines.append(f"the runs do not differ in their {found.steps} common steps")
    else:
        lines.append(f"the first difference: {found.first.text}")
        if found.first.kind == "state" and found.cycle > 1:
            lines.append(
                f"a part of the state is compared in each step, and all of it in {found.cycle} "
                "steps: the sum or the update of one of these steps was the first to differ"
            )
        if found.first.kind in ("gradient", "sum") and found.digest_steps[0] > 1:
            lines.append(
                "a part of each gradient and sum is compared in each step, and all of them in "
                f"{found.digest_steps[0]} steps, so an earlier step may have been the first to "
                "differ; runs with --digest-steps 1 are compared byte for byte"
            )
    if found.lengths[0] != found.lengths[1]:
        lines.append(f"one run has {found.lengths[0]} steps, the other one {found.lengths[1]}")
    if not found.has_losses:
        lines.append("one of the ledgers has no losses of tasks: an older release has written it")
    if not found.has_states:
        lines.append(
            "states were not compared: the runs differ in --fingerprint-steps or --shard-optimizer"
        )
    if found.digest_steps[0] != found.digest_steps[1]:
        lines.append(
            "gradients and sums were not compared: the runs have --digest-steps "
            f"{found.digest_steps[0]} and {found.digest_steps[1]} (0: no digests)"
        )
    elif not found.digest_steps[0]:
        lines.append(
            "gradients and sums were not compared: the ledgers have no digests of them "
            "(--digest-steps 0, or an older release)"
        )
    return "\n".join(lines)
