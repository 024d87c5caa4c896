"""Computes what turns a step's sums into means, from the rows of its tasks.

Without weights the gradient is the mean over the step's samples, with weights the sum divided by
their total. A batch that the script has left out has no part in either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import Plan
from holdfast.engine.train.step.step_table import LEFT_OUT, UNWEIGHTED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMean:
    """Keeps a step's loss, and the factors of its gradient.

    `scale`: multiplies the sum. `weight`: divides it; 0 if no batch of the step counts. `left_out`:
    the virtual ranks whose batches were left out.
    """

    loss: float
    scale: float = 1.0
    weight: float = 1.0
    left_out: Collection[int] = ()


def find_mean(
    plan: Plan,
    index: int,
    counts: Sequence[int],
    weights: Sequence[float],
    losses: Sequence[float],
) -> StepMean:
    """Return the mean of a script's step; the sequences have an item for each virtual rank.

    Raises UserError if only some of the batches were given a weight.
    """
    rows = list(zip(counts, weights, strict=True))
    if any(UNWEIGHTED < weight < 0 or LEFT_OUT < weight < UNWEIGHTED for weight in weights):
        raise UserError(
            f"in step {index} some processes of a worker left out a batch, or gave it a weight, "
            "and others did not: let them decide alike"
        )
    kept = [(count, weight) for count, weight in rows if count and weight != LEFT_OUT]
    left_out = frozenset(
        vrank for vrank, (count, weight) in enumerate(rows) if count and weight in (LEFT_OUT, 0.0)
    )
    if all(weight >= 0 for _, weight in kept):
        total = _total([max(weight, 0.0) for weight in weights])
        if not total > 0:
            return StepMean(loss=math.nan, weight=0.0, left_out=left_out)
        return StepMean(loss=_total(losses) / total, weight=total, left_out=left_out)
    if any(weight >= 0 for _, weight in kept):
        raise UserError(
            f"some batches of step {index} were given a weight and others not: give "
            "step.backward a weight in every batch, or in none"
        )
    assert isinstance(plan, SamplePlan), "other losses are weighted"
    # 1 unless samples were dropped or left out
    scale = plan.step_samples(index) / sum(count for count, _ in kept)
    shares = zip(losses, plan.all_weights(index), strict=True)
    loss = _total([loss * share for loss, share in shares]) / plan.virtual_ranks * scale
    return StepMean(loss=loss, scale=scale, left_out=left_out)


def _total(values: Sequence[float]) -> float:
    """Add up values in the canonical order."""
    leaves = {(vrank, 1): value for vrank, value in enumerate(values)}
    return tree.fold(leaves, len(values), lambda a, b: a + b)
