"""Finds the first step at which two runs of one job differ, and what differs there.

It reads both ledgers and computes nothing again. Must not know torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.errors import UserError
from holdfast.observe.step_records import RunSteps, StepDifference, find_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Describes two runs: how many steps both have, and the first difference.

    `cycle`: how many steps it takes to compare all of the state; 0: it is not compared.
    `has_losses`: both ledgers have the losses of tasks, which those of older releases have not.
    """

    steps: int
    first: StepDifference | None
    lengths: tuple[int, int]
    cycle: int
    has_losses: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "equal": self.first is None,
            "steps": self.steps,
            "lengths": list(self.lengths),
            "first_difference": None if self.first is None else asdict(self.first),
        }


def compare_runs(ours: RunSteps, theirs: RunSteps, cycle: int) -> Comparison:
    """Compare two runs. UserError if they are no runs of one job, or have no step in common."""
    _check_same_job(ours, theirs)
    common = sorted(ours.steps.keys() & theirs.steps.keys())
    if not common:
        raise UserError(f"{ours.name} and {theirs.name} have no step in common")
    names = (ours.name, theirs.name)
    pairs = ((ours.steps[step], theirs.steps[step]) for step in common)
    found = (find_difference(a, b, names) for a, b in pairs)
    return Comparison(
        steps=len(common),
        first=next((each for each in found if each is not None), None),
        lengths=(len(ours.steps), len(theirs.steps)),
        cycle=cycle,
        has_losses=all(run.steps[common[-1]].losses for run in (ours, theirs)),
    )


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
