"""`holdfast compare A B` finds the first step at which two runs differ, and what differs there.

It only reads both ledgers. Exit status: 0 no difference, 1 a difference, 2 the runs cannot be
compared. Must not know torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.step_records import (
    Comparable,
    RunSteps,
    StepDifference,
    find_difference,
    has_digests,
    has_losses,
    read_steps,
)
from holdfast.engine.runtime.rundir import RunDir


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
    """Return the settings that choose the parts of the state that a run digests in its steps."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Describes two runs: how many steps both have, and the first difference.

    `cycle`: how many steps it takes to compare all of the state; 0: it is not compared.
    `digest_steps`: of each run, how many steps it takes to compare all of its gradients; 0: they
    are not compared. `has_states`: the digests of states were compared. `has_losses`: both ledgers
    have the losses of tasks; ledgers of older releases lack them.
    """

    steps: int
    first: StepDifference | None
    lengths: tuple[int, int]
    cycle: int
    has_losses: bool
    digest_steps: tuple[int, int] = (0, 0)
    has_states: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "equal": self.first is None,
            "steps": self.steps,
            "lengths": list(self.lengths),
            "states_compared": self.has_states and bool(self.cycle),
            "digest_steps": list(self.digest_steps),
            "first_difference": None if self.first is None else asdict(self.first),
        }


def compare_runs(
    ours: RunSteps, theirs: RunSteps, cycle: int, *, has_states: bool = True
) -> Comparison:
    """Compare two runs. UserError if they are no runs of one job, or have no step in common.

    `has_states`: both have digested the same parts of the state in each step.
    """
    _check_same_job(ours, theirs)
    common = sorted(ours.steps.keys() & theirs.steps.keys())
    if not common:
        raise UserError(f"{ours.name} and {theirs.name} have no step in common")
    names = (ours.name, theirs.name)
    pairs = ((ours.steps[step], theirs.steps[step]) for step in common)
    digests = _digest_steps(ours), _digest_steps(theirs)
    alike = Comparable(states=has_states, gradients=digests[0] == digests[1])
    found = (find_difference(a, b, names, alike) for a, b in pairs)
    first = next((each for each in found if each is not None), None)
    if first is not None and first.kind == "state" and digests == (1, 1):
        first = _name_update(first, ours, theirs, cycle)
    return Comparison(
        steps=len(common),
        first=first,
        lengths=(len(ours.steps), len(theirs.steps)),
        cycle=cycle,
        has_losses=all(has_losses(run.steps[step]) for run in (ours, theirs) for step in common),
        digest_steps=digests,
        has_states=has_states,
    )


def _digest_steps(run: RunSteps) -> int:
    return 0 if run.header is None else run.header.digest_steps


def _name_update(
    found: StepDifference, ours: RunSteps, theirs: RunSteps, cycle: int
) -> StepDifference:
    """Return the difference if the sums of all steps that may have made another state are equal.

    Every byte of the gradients and sums was compared in each step.
    """
    before = range(max(found.step - cycle, 0), found.step)
    steps = [run.steps.get(step) for run in (ours, theirs) for step in before]
    if not before or not all(line is not None and has_digests(line) for line in steps):
        return found
    which = f"step {before[0]}" if len(before) == 1 else f"one of steps {before[0]} to {before[-1]}"
    text = (
        f"step {found.step} began with another state, and all gradients and sums before it are the "
        f"same: the update of {which} differs, or something has changed the state after it"
    )
    return replace(found, kind="update", text=text)


def _check_same_job(ours: RunSteps, theirs: RunSteps) -> None:
    """Raise UserError if two ledgers are of jobs that compute other things."""
    a, b = ours.header, theirs.header
    if a is None or b is None:
        empty = ours.name if a is None else theirs.name
        raise UserError(f"the ledger of {empty} has no header: it is damaged, or no step was taken")
    for what, x, y in (
        ("virtual ranks", a.virtual_ranks, b.virtual_ranks),
        ("the seed", a.seed, b.seed),
        ("the plan", a.plan, b.plan),
    ):
        if x != y:
            raise UserError(
                f"{ours.name} and {theirs.name} are runs of two jobs: {what} {x} and {y}"
            )
