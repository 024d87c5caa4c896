"""Reads the record of each step from a run's ledger, and compares the records of two runs.

Of several copies of a step the one of the newest view counts. Steps that were withdrawn because
something wrong may have been used in them do not. Must not know torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.engine.records.ledger import (
    NOT_TAKEN,
    HeaderLine,
    StepLine,
    Uses,
    find_ledger_files,
    read_doubts,
    read_lines,
)


@dataclass(slots=True)
class RunSteps:
    """Lists the steps of one run; `header`: the first one of its ledger."""

    name: str
    header: HeaderLine | None = None
    steps: dict[int, StepLine] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Describes the difference between two records of a step: its kind, and a sentence on it.

    `kind`: "samples", "state", "update", "task", "gradient", "values", "step" or "sum".
    `vranks`: the virtual ranks that differ.
    """

    step: int
    kind: str
    text: str
    vranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparable:
    """Marks the digests of two runs that cover the same bytes in the same step."""

    states: bool = True
    gradients: bool = True


ALL = Comparable()


def read_steps(run_dir: str | os.PathLike[str]) -> RunSteps:
    """Read all steps of a run. UserError if it has no ledger."""
    paths = find_ledger_files(run_dir)
    doubts, found = read_doubts(paths), RunSteps(str(run_dir))
    for line in (line for path in paths for line in read_lines(path)):
        if isinstance(line, HeaderLine):
            found.header = found.header or line
        elif isinstance(line, StepLine) and not any(doubt.withdraws(line) for doubt in doubts):
            known = found.steps.get(line.step)
            if known is None or line.view > known.view:
                found.steps[line.step] = line
    return found


def find_difference(
    ours: StepLine, theirs: StepLine, names: tuple[str, str], alike: Comparable = ALL
) -> StepDifference | None:
    """Return the first cause for which two records of one step differ, or None.

    `names`: of the two runs. Samples come first, then the state that the step began with, then the
    losses of its tasks, then their gradients, then values that tasks have handed over, then the sum
    of the gradients. It does not count which worker computed a task. `alike`: which digests are of
    the same parts.
    """
    step = ours.step
    if ours.uses is theirs.uses is Uses.NO_SAMPLES and ours.told != theirs.told:
        told = [each.told or "nothing" for each in (ours, theirs)]
        text = (
            f"step {step}: workers agreed on {told[0]} in {names[0]} and on {told[1]} in {names[1]}"
        )
        return StepDifference(step=step, kind="values", text=text)
    if len(ours.counts) != len(theirs.counts) or ours.place != theirs.place:
        text = f"step {step} is another step of the script, or has other virtual ranks"
        return StepDifference(step=step, kind="step", text=text)
    marks = [zip(each.counts, each.digests, strict=True) for each in (ours, theirs)]
    if vranks := _first_difference(*map(list, marks)):
        hosts = _hosts(ours, theirs, vranks, names)
        text = f"step {step}: {_ranks(vranks)} used other samples; {hosts}"
        return StepDifference(step=step, kind="samples", text=text, vranks=vranks)
    if alike.states and ours.state != theirs.state and NOT_TAKEN not in (ours.state, theirs.state):
        text = f"step {step} began with another state"
        return StepDifference(step=step, kind="state", text=text)
    both = ours.losses and theirs.losses
    if both and (vranks := _first_difference(*map(_bits_of, (ours, theirs)))):
        pair = [each.all_losses()[vranks[0]] for each in (ours, theirs)]
        text = (
            f"step {step}: the loss of virtual rank {vranks[0]} is {pair[0]!r} in {names[0]} and "
            f"{pair[1]!r} in {names[1]}, from the same samples; "
            f"{_hosts(ours, theirs, vranks, names)}"
        )
        return StepDifference(step=step, kind="task", text=text, vranks=vranks)
    if alike.gradients and (difference := _find_gradient(ours, theirs, names)) is not None:
        return difference
    if ours.handed != theirs.handed:
        every = sorted({*ours.handed, *theirs.handed})
        vranks = tuple(v for v in every if ours.handed.get(v) != theirs.handed.get(v))
        text = f"step {step}: {_ranks(vranks)} handed over other values"
        return StepDifference(step=step, kind="values", text=text, vranks=vranks)
    if ours.loss != theirs.loss and ours.place.uses is not Uses.NO_SAMPLES:
        pair = [float.fromhex(each.loss) for each in (ours, theirs)]
        text = f"step {step}: the loss is {pair[0]!r} in {names[0]} and {pair[1]!r} in {names[1]}"
        return StepDifference(step=step, kind="step", text=text)
    if alike.gradients and _has_other_sum(ours, theirs):
        text = f"step {step}: the sum of the gradients differs, and those of all tasks are the same"
        return StepDifference(step=step, kind="sum", text=text)
    return None


def has_losses(line: StepLine) -> bool:
    """Return whether a step has the losses of its tasks, or computes none."""
    return line.uses is Uses.NO_SAMPLES or bool(line.losses)


def has_digests(line: StepLine) -> bool:
    """Return whether a step has all digests of its gradients and its sum, or has no sum."""
    return line.uses is Uses.NO_SAMPLES or (bool(line.gradients) and line.sum != NOT_TAKEN)


def _find_gradient(
    ours: StepLine, theirs: StepLine, names: tuple[str, str]
) -> StepDifference | None:
    """Return the difference between the gradients of two records of a step, or None."""
    pairs = zip(ours.all_gradients(), theirs.all_gradients(), strict=False)
    vranks = tuple(
        v for v, pair in enumerate(pairs) if NOT_TAKEN not in pair and pair[0] != pair[1]
    )
    if not vranks:
        return None
    differ = "gradient of {} differs" if len(vranks) == 1 else "gradients of {} differ"
    same = "" if _has_other_sum(ours, theirs) else ", and the sum of all is the same"
    text = (
        f"step {ours.step}: the {differ.format(_ranks(vranks))}, from the same samples{same}; "
        f"{_hosts(ours, theirs, vranks, names)}"
    )
    return StepDifference(step=ours.step, kind="gradient", text=text, vranks=vranks)


def _has_other_sum(ours: StepLine, theirs: StepLine) -> bool:
    return ours.sum != theirs.sum and NOT_TAKEN not in (ours.sum, theirs.sum)


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> tuple[int, ...]:
    """Return the places at which two lists differ."""
    return tuple(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)


def _bits_of(line: StepLine) -> list[str]:
    """Return the bits of each loss: two that are no numbers may differ, or be the same."""
    return [line.losses[i : i + 16] for i in range(0, len(line.losses), 16)]


def _ranks(vranks: Sequence[int]) -> str:
    some = ", ".join(map(str, vranks[:5])) + (" and more" if len(vranks) > 5 else "")
    return f"virtual rank{'s' if len(vranks) > 1 else ''} {some}"


def _hosts(ours: StepLine, theirs: StepLine, vranks: Sequence[int], names: tuple[str, str]) -> str:
    """Return which worker computed the first of these virtual ranks in each run."""
    workers = [each.hosts[vranks[0]][0] for each in (ours, theirs)]
    return f"worker {workers[0]} computed it in {names[0]}, worker {workers[1]} in {names[1]}"
