"""Finds the first step at which two runs of one job differ, and what differs there.

It reads both ledgers and computes nothing again. Must not know torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.step_records import (
    Comparable,
    RunSteps,
    StepDifference,
    find_difference,
    has_digests,
    has_losses,
)


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
    """Return what differs if the sums of all steps that may have made another state are the same.

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
