"""Decides which checkpoints to keep. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.types import NO_VIEW, ViewNumber


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SaveOrder:
    """Orders the checkpoints of a job: by the view that saved them, then by their step.

    A job that had to go back saves lower steps again, in a later view. Times do not order them: the
    clocks of two nodes differ, and a clock may be set back. A checkpoint that was imported, for
    example, is of no view.
    """

    view: ViewNumber
    step: int

    def is_before(self, other: SaveOrder) -> bool:
        """Return whether this was saved before `other`, as far as is known without a view."""
        return self.step < other.step if self.view == NO_VIEW else self < other


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Describes a checkpoint. `age_s`: by the clocks of this machine and the saving one."""

    order: SaveOrder
    age_s: float = 0.0

    @property
    def step(self) -> int:
        return self.order.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keeps a checkpoint if any of these rules wants it; the newest is always kept."""

    last: int = 3  # how many of the newest are kept
    settled: int = 0  # and the newest of those older than the newest by these steps
    every: int = 0  # and those whose step is a multiple of this; 0: none
    age_s: float = 0.0  # and those younger than this; 0: none


def choose_kept(saved: Sequence[Saved], policy: Retention) -> tuple[int, ...]:
    """Choose the steps to keep, in order."""
    ordered = sorted(saved, key=lambda each: each.order)
    newest = {each.step for each in ordered[-max(policy.last, 1) :]}
    settled = [s.step for s in ordered if s.step <= ordered[-1].step - policy.settled]
    if policy.settled and settled:
        newest.add(max(settled))
    return tuple(
        sorted(
            each.step
            for each in ordered
            if each.step in newest
            or (policy.every > 0 and each.step % policy.every == 0)
            or (policy.age_s > 0 and each.age_s < policy.age_s)
        )
    )
